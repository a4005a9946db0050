"""Registries: what oktopk has by name, and what plug-ins add to it.

A plug-in is found in two ways: its package has an entry point in the group of the registry, or it is assigned to
the registry by a module that OKTOPK_IMPORT names (`--import` sets it, and child processes inherit it). Both are
looked at when a name is not known, or when all are asked for. Importing oktopk imports no plug-in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib import import_module, metadata
from threading import RLock
from typing import Any, TypeVar

from .names import hint

T = TypeVar("T")
IMPORT = "OKTOPK_IMPORT"
"""The environment variable with the modules to import, separated by commas."""
_PLUGIN_ERRORS = (Exception, SystemExit)
"""What a plug-in may end its import with."""
log = logging.getLogger(__name__)

_lock = RLock()  # ranks that are threads ask at the same time, and a plug-in asks while it is imported
_failed: dict[str, str] = {}
"""Modules of OKTOPK_IMPORT that could not be imported, and why."""
_tried: set[str] = set()


class PluginError(ImportError, KeyError):
    """A plug-in is installed, but cannot be used; the cause is chained."""


class Registry(MutableMapping[str, T]):
    """Things of one kind by name: a dictionary that looks for plug-ins when a name is not in it.

    A plug-in that fails is a warning, once, and is left out of the iteration; asking for its name raises a
    PluginError with the cause.

    Args:
        kind: What its things are, for messages.
        group: The entry point group of plug-ins.
        accept: Called with the name and the thing of every assignment; returns what to keep, or raises TypeError
            or ValueError.
        built_in: What comes with oktopk. No plug-in can have one of these names; an assignment can.

    >>> colours = Registry("colour", "example.colours", lambda name, thing: int(thing), {"black": 0})
    >>> colours["red"] = 0xFF0000
    >>> list(colours)
    ['black', 'red']
    >>> colours.find("rde")
    Traceback (most recent call last):
    ValueError: unknown colour 'rde': did you mean 'red'?
    """

    def __init__(self, kind: str, group: str, accept: Callable[[str, Any], T], built_in: Mapping[str, T]) -> None:
        self.kind, self.group = kind, group
        self._accept = accept
        self._built_in, self._known = frozenset(built_in), dict(built_in)
        self._loaded: set[str] = set()
        self._broken: dict[str, tuple[str, BaseException]] = {}
        """Plug-ins that cannot be used: why, in one line, and the error itself."""

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            import_named_modules()
        if name not in self._known:
            self._load(name)
        if name not in self._known and name in self._broken:
            raise self.problem(name)
        return self._known[name]

    def __setitem__(self, name: str, thing: Any) -> None:
        self._known[name] = self._accept(name, thing)

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        import_named_modules()
        for name in _entry_points(self.group):
            self._load(name)
        return iter([*self._known])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{self.kind}s: {', '.join(self.names())}>"

    def names(self) -> list[str]:
        """All names, those of plug-ins that are not imported yet included."""
        import_named_modules()
        return list(dict.fromkeys([*self._known, *_entry_points(self.group)]))

    def find(self, name: object) -> T:
        """What the name stands for.

        Raises:
            ValueError: there is no such name; the message suggests another one.
            PluginError: a plug-in has the name, and cannot be used.
        """
        if isinstance(name, str) and name in self:
            return self[name]
        raise self.problem(name)

    def problem(self, name: object) -> ValueError | PluginError:
        """The error that says why a name cannot be used."""
        if isinstance(name, str) and name in self._broken:
            text, cause = self._broken[name]
            error = PluginError(text)
            error.__cause__ = cause
            return error
        failed = "".join(f" ({IMPORT}: {module}: {why})" for module, why in _failed.items())
        return ValueError(f"unknown {self.kind} {name!r}: {hint(str(name), self.names())}{failed}")

    def _load(self, name: str) -> None:
        """Load the plug-in of that name, if there is one; a failure is remembered."""
        found = _entry_points(self.group).get(name, ())
        with _lock:
            if not found or name in self._loaded:
                return
            self._loaded.add(name)
            try:
                self._load_one(name, found)
            except _PLUGIN_ERRORS as error:
                who = " and ".join(sorted(map(_package, found)))
                text = f"the {self.kind} {name!r} of {who} cannot be used: {explain(error)}"
                self._broken[name] = text, error
                log.warning("%s", text)

    def _load_one(self, name: str, found: list[metadata.EntryPoint]) -> None:
        if name in self._built_in:
            raise ValueError(f"oktopk itself has the {self.kind} {name!r}, which stays: choose another name")
        if len(found) > 1:
            raise ValueError("several packages have the same name: uninstall all but one")
        if name not in self._known:  # an imported module may have assigned it
            self[name] = found[0].load()


@cache
def _entry_points(group: str) -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of a group by name, sorted, so that they have the same order on all hosts."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for one in sorted(metadata.entry_points(group=group), key=lambda one: one.name):
        found.setdefault(one.name, []).append(one)
    return found


def _package(one: metadata.EntryPoint) -> str:
    return f"{one.dist.name} {one.dist.version}" if one.dist is not None else one.value


def explain(error: BaseException) -> str:
    """The error of a plug-in in one line.

    >>> explain(ZeroDivisionError("division by zero")), explain(ImportError("No module named 'x'"))
    ('ZeroDivisionError: division by zero', "No module named 'x'")
    """
    text = " ".join(str(error).split())
    if isinstance(error, ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def split_modules(text: str) -> list[str]:
    """
    >>> split_modules("a.b, c,,a.b")
    ['a.b', 'c']
    """
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def import_modules(modules: Iterable[str]) -> None:
    """Import modules that plug something in, now, and in all processes that this one starts.

    Raises:
        ImportError: a module cannot be imported; the message names it and says why in one line.
    """
    before = split_modules(os.environ.get(IMPORT, ""))
    every = list(dict.fromkeys([*before, *modules]))
    for module in every:
        if problem := _import(module):
            raise ImportError(f"{module}: {problem}", name=module)
    if every:
        os.environ[IMPORT] = ",".join(every)


def import_named_modules() -> None:
    """Import the modules that OKTOPK_IMPORT names; one that fails is a warning, once."""
    for module in split_modules(os.environ.get(IMPORT, "")):
        with _lock:
            if module in _tried:
                continue
            _tried.add(module)
            if problem := _import(module):
                _failed[module] = problem
                log.warning("%s names the module %s, which cannot be imported: %s", IMPORT, module, problem)


def _import(module: str) -> str | None:
    """Import a module; returns why that fails, or None."""
    try:
        import_module(module)
    except _PLUGIN_ERRORS as error:
        if module.endswith(".py"):
            name = module[:-3].strip("./").replace("/", ".")
            return f"pass the name of the module, {name}, not that of its file"
        return explain(error)
    return None
