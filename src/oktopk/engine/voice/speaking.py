"""Lines that people should see, even if their script configures no logging."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...algorithms import Dense
from ...algorithms.rehearsal import compile_kernels
from ...kernels import must_compile
from ..settings import Settings

COMPILING = "oktopk: compiling kernels (once per installation, about 10 s)"
_log = logging.getLogger("oktopk")
_lock, _compiling = threading.Lock(), threading.Lock()
_hushed = 0
"""Blocks of hushed() that are under way."""
_compiled: set[str] = set()


def say(text: str) -> None:
    """Log a line at INFO, to the logger "oktopk"; if logging is not configured at all, write it to stderr.

    Until a script configures logging, Python drops INFO. Most training scripts never do, and their users wait for
    the plan and the decision. Nothing is installed: from the moment that someone configures logging, the line is a
    record like any other, seen once. `logging.getLogger("oktopk").setLevel(logging.WARNING)` silences it.
    """
    if _hushed:
        return
    if _log.hasHandlers():
        _log.info("%s", text)
    elif _log.level <= logging.INFO and _log.manager.disable < logging.INFO:
        logging.StreamHandler().handle(_log.makeRecord(_log.name, logging.INFO, __file__, 0, text, (), None))


def compile_once(settings: Settings, speaks: bool) -> None:
    """Compile the kernels of sparse steps in the first step of a run, unless an earlier process has done so."""
    if isinstance(settings.algorithm, Dense):
        return
    with _compiling:
        if settings.algorithm.name not in _compiled and must_compile():
            if speaks:
                say(COMPILING)
            compile_kernels(settings.algorithm, settings.values)
        _compiled.add(settings.algorithm.name)


@contextmanager
def hushed() -> Iterator[None]:
    """A block whose reductions nobody wants to hear of: rehearsals, and whoever has a plan of its own."""
    global _hushed
    with _lock:
        _hushed += 1
    try:
        yield
    finally:
        with _lock:
            _hushed -= 1
