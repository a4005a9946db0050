"""Memory whose neighbours cannot be touched: whoever reads or writes beyond an array ends the process at once."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

PAGE = mmap.PAGESIZE
_CANARY = b"\xa5" * 64


class Guarded:
    """Room for arrays that end right before a page without any rights, or begin right behind one."""

    def __init__(self, room: int) -> None:
        self.room = -(-room // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.room + 2 * PAGE)
        whole = np.frombuffer(self._map, np.uint8)
        _forbid(whole.ctypes.data)
        _forbid(whole.ctypes.data + PAGE + self.room)
        self._memory = whole[PAGE : PAGE + self.room]
        self._memory[:] = _CANARY[0]
        self._start = self._stop = PAGE

    def array(self, count: int, dtype: Any, at_end: bool) -> Array:
        """Uninitialised; it is valid until the next one is asked for."""
        size = count * np.dtype(dtype).itemsize
        if size > self.room:
            raise MemoryError(f"{size} bytes asked for, there are {self.room}")
        self._memory[self._start - PAGE : self._stop - PAGE] = _CANARY[0]
        self._start = PAGE + (self.room - size if at_end else 0)
        self._stop = self._start + size
        return self._memory[self._start - PAGE : self._stop - PAGE].view(dtype)

    def intact(self) -> bool:
        """Whether the bytes on the array's open side are as they were."""
        before = self._map[max(PAGE, self._start - len(_CANARY)) : self._start]
        behind = self._map[self._stop : min(PAGE + self.room, self._stop + len(_CANARY))]
        return before == _CANARY[: len(before)] and behind == _CANARY[: len(behind)]


def _forbid(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "a page cannot be protected")


class GuardedNumpy(SimpleNamespace):
    """NumPy for `wire`, whose `empty` gives guarded memory, and never much more than the message is long."""

    def __init__(self, room: int) -> None:
        super().__init__(int32=np.int32, int64=np.int64, float32=np.float32, uint8=np.uint8, uint64=np.uint64)
        self._places = {np.dtype(kind): Guarded(room) for kind in (np.int32, np.int64, np.float32)}
        self.at_end, self.limit = True, room

    def empty(self, count: int, dtype: Any) -> Array:
        size = count * np.dtype(dtype).itemsize
        if size > self.limit:
            raise MemoryError(f"{size} bytes asked for, at most {self.limit} can be needed")
        return self._places[np.dtype(dtype)].array(count, dtype, self.at_end)

    def intact(self) -> bool:
        return all(place.intact() for place in self._places.values())
