"""Files of lines that a later run goes on with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

TAIL = 1 << 20
"""How far back the start of an unfinished line is looked for, in bytes."""


class LineFile:
    """Appends whole lines, and hands them to the system at once: they survive the end of the process.

    A missing folder is made. A path that cannot be written to is an error here, not in the middle of a run;
    `check` looks at what an existing file holds, puts it in order, and may refuse it.
    """

    def __init__(self, path: str | os.PathLike[str], check: Callable[[LineFile], None]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115 - close() closes it
        except OSError as error:
            message = f"metrics cannot be written here: {error.strerror}"
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
        """With its line feed, unless a killed process left it unfinished."""
        self._file.seek(max(0, self.size - TAIL))
        tail = self._file.read()
        return tail[tail.rfind(b"\n", 0, -1) + 1 :]

    def finish_last_line(self, whole: Callable[[bytes], bool], ours: Callable[[bytes], bool]) -> None:
        """Give a whole line the line feed it lacks, and cut off an unfinished one, if it is one of ours."""
        line = self.last_line()
        if not line or line.endswith(b"\n"):
            return
        if whole(line):
            self.write("\n")
        elif ours(line):
            log.warning("%s: cut off an unfinished line of %d bytes", self.path, len(line))
            self.cut(len(line))
        else:
            raise ValueError(f"{self.path} holds something else: it ends in a line that is not one of metrics")

    def cut(self, count: int) -> None:
        """Take away the last bytes."""
        self._file.truncate(self.size - count)

    def write(self, text: str) -> None:
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        self._file.close()
