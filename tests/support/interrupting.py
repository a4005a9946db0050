"""Ctrl-C at a chosen line of the library, in the thread that calls it."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import oktopk

FRONT_ENDS = ("frontends", "engine", "feedback")
COLLECTIVE = ("collective.py", "algorithms", "comm", "feedback", "metrics", "wire")
"""All that sparse_allreduce runs in the thread that calls it, but for kernels."""


class InterruptAt:
    """Raises KeyboardInterrupt at the `at`-th line that the library runs in this thread inside the block.

    By default algorithms, kernels and communicators are left alone: whatever calls them is watched. Without `at`
    it counts. Nor does it raise at a `with`: unlike a tracer, a signal does not come between a block and its
    __exit__.
    """

    def __init__(self, at: int | None = None, watched: tuple[str, ...] = FRONT_ENDS) -> None:
        self.at, self.lines = at, 0
        self._watched = tuple(str(Path(oktopk.__path__[0], one)) for one in watched)

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_function(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._next_line if frame.f_code.co_filename.startswith(self._watched) else None

    def _next_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _is_with(frame):
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._next_line


def _is_with(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
