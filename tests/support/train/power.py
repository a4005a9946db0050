"""A disk that loses, when the power fails, whatever nobody has asked it to keep.

A file outlasts a power cut as it was when it was last synced, a name as it was when its folder was last synced.
What is newer may be there or not, each part of it by itself: a name without its content, half a file, one rename
and not the one before it.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

Node = bytes | dict[str, int]
"""What a file holds, or the numbers of what a folder holds by name."""
Choice = Callable[[str, Any, Any], Any]
"""Of "name" or "content", as it was kept and as it is: what the power cut leaves."""


def nothing_newer(kind: str, kept: Any, newest: Any) -> Any:
    return kept


def names_without_content(kind: str, kept: Any, newest: Any) -> Any:
    return newest if kind == "name" else kept


def content_without_names(kind: str, kept: Any, newest: Any) -> Any:
    return newest if kind == "content" else kept


def by_chance(random: Random) -> Choice:
    def choose(kind: str, kept: Any, newest: Any) -> Any:
        torn = newest[: len(newest) // 2] if kind == "content" and newest != kept else newest
        return random.choice([kept, newest, torn])

    return choose


@dataclass(frozen=True)
class Cut:
    """The disk at the moment of a power cut, seen from its root: what it had to keep, and what it had."""

    root: int
    kept: dict[int, Node]
    newest: dict[int, Node]
    phase: str

    def leave(self, folder: Path, choose: Choice) -> None:
        """Write what is left to a new folder."""
        self._write(self.root, folder, choose)

    def _write(self, number: int, place: Path, choose: Choice) -> None:
        newest = self.newest.get(number, self.kept.get(number))
        kept = self.kept.get(number, b"" if isinstance(newest, bytes) else {})
        if isinstance(newest, bytes):
            place.write_bytes(choose("content", kept, newest))
            return
        assert isinstance(newest, dict)
        assert isinstance(kept, dict)
        place.mkdir()
        for name in sorted({**kept, **newest}):
            if (found := choose("name", kept.get(name), newest.get(name))) is not None:
                self._write(found, place / name, choose)


class LossyDisk:
    """Watches what is done below `root`. `cuts` has a power cut before each thing done, and one per pause()."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.phase = root, ""
        self.cuts: list[Cut] = []
        self._kept: dict[int, Node] = {}
        self._handles: dict[int, int] = {}  # of all that was ever there: a number is not given away twice
        self._lock = threading.RLock()
        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def pause(self, phase: str) -> None:
        """From here on cuts are of this phase."""
        self.phase = phase
        self._cut()

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:
                newest = self._cut()
                if name != "fsync":
                    return call(*arguments, **keywords)
                number = os.fstat(arguments[0]).st_ino
                self._kept[number] = newest[number]
            return None

        return watched

    def _cut(self) -> dict[int, Node]:
        newest: dict[int, Node] = {}
        root = self._see(self.root, newest)
        self.cuts.append(Cut(root, dict(self._kept), newest, self.phase))
        return newest

    def _see(self, path: Path, seen: dict[int, Node]) -> int:
        status = path.stat()
        if status.st_ino not in self._handles:
            self._handles[status.st_ino] = os.open(path, os.O_RDONLY)
        folder = stat.S_ISDIR(status.st_mode)
        entries = {entry.name: self._see(entry, seen) for entry in path.iterdir()} if folder else path.read_bytes()
        seen[status.st_ino] = entries
        return status.st_ino
