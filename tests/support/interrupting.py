"""Ctrl-C at a chosen line of the library, in the thread that calls it."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any

from tests.support.paths import ROOT

_WATCHED = tuple(str(ROOT / "src" / "oktopk" / folder) for folder in ("frontends", "engine", "feedback"))


class InterruptAt:
    """Raises KeyboardInterrupt at the `at`-th line that the library runs in this thread inside the block.

    Algorithms, kernels and communicators are left alone: whatever calls them is watched. Without `at` it counts.
    Nor does it raise at a `with`: unlike a tracer, a signal does not come between a block and its __exit__.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_function(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._next_line if frame.f_code.co_filename.startswith(_WATCHED) else None

    def _next_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _is_with(frame):
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._next_line


def _is_with(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
