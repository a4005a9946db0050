"""Line files that a later run appends to, and the base class of sinks that write one."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .base import Sink

log = logging.getLogger(__name__)

TAIL = 1 << 20
"""Bytes at the end of a file in which the start of its last line is searched."""


class LineFile:
    """Appends whole lines and flushes them at once, so that they survive the end of the process.

    Creates missing folders. A path that cannot be written raises here, not in the middle of a run.

    Args:
        path: The file to append to.
        check: Called with the open file, to repair the end of an existing file or to reject the file by raising.
    """

    def __init__(self, path: str | os.PathLike[str], check: Callable[[LineFile], None]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115 - close() closes it
        except OSError as error:
            message = f"cannot write metrics: {error.strerror}"
            raise OSError(error.errno, message, str(self.path)) from error
        try:
            check(self)
        except BaseException:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def first_line(self) -> bytes:
        self._file.seek(0)
        return self._file.readline()

    def last_line(self) -> bytes:
        """The last line, with its line feed unless a killed process left the line unfinished."""
        self._file.seek(max(0, self.size - TAIL))
        tail = self._file.read()
        return tail[tail.rfind(b"\n", 0, -1) + 1 :]

    def finish_last_line(self, whole: Callable[[bytes], bool], ours: Callable[[bytes], bool]) -> None:
        """Add a missing line feed to a whole line, and remove an unfinished line if a sink wrote it."""
        line = self.last_line()
        if not line or line.endswith(b"\n"):
            return
        if whole(line):
            self.write("\n")
        elif ours(line):
            log.warning("%s: removed an unfinished line of %d bytes", self.path, len(line))
            self.truncate_by(len(line))
        else:
            raise ValueError(f"{self.path} is not a metrics file, judging by its last line: choose another file")

    def truncate_by(self, count: int) -> None:
        """Remove the last `count` bytes."""
        self._file.truncate(self.size - count)

    def write(self, text: str) -> None:
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        self._file.close()


class FileSink(Sink):
    """Appends events to a line file. A subclass implements _check(), as LineFile calls it, and _write()."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._file = LineFile(path, self._check)
        self.path = self._file.path

    @abstractmethod
    def _check(self, file: LineFile) -> None: ...

    def _close(self) -> None:
        self._file.close()
