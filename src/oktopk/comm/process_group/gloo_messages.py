"""Messages by the send and recv of a gloo group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...metrics.traffic import Operation
from ..messages import MIN_RECEIVE, Closed, Messages, Transfer, trim

_TAG = 0


class _Send(Transfer):
    """A torch Work, and the buffer that it needs."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self.work, self._buffer = work, buffer

    def wait(self, timeout: timedelta) -> None:
        work = self.work  # another thread may drop it
        if work is None:
            raise Closed
        work.wait(timeout)

    def message(self, peer: int, operation: Operation) -> Tensor:
        return self._buffer


class _Receive(_Send):
    def message(self, peer: int, operation: Operation) -> Tensor:
        return trim(self._buffer, peer, operation)


class GlooMessages(Messages):
    """Messages in a group of torch; a message may be smaller than its receive."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pending: weakref.WeakSet[_Send] = weakref.WeakSet()
        self._lock = threading.RLock()  # a signal may close it in the very thread that holds it

    def send(self, message: Tensor, peer: int) -> Transfer:
        return self._begin(lambda group: _Send(group.send([message], peer, _TAG), message))

    def receive(self, capacity: int, peer: int) -> Transfer:
        buffer = torch.empty(max(capacity, MIN_RECEIVE), dtype=torch.uint8)
        return self._begin(lambda group: _Receive(group.recv([buffer], peer, _TAG), buffer[:capacity]))

    def _begin(self, begin: Callable[[Any], _Send]) -> Transfer:
        with self._lock:
            if self._group is None:
                raise Closed
            transfer = begin(self._group)
            self._pending.add(transfer)
        return transfer

    def close(self) -> None:
        """Drop the group and all that is under way: its connections last as long as the last reference."""
        with self._lock:
            self._group = None
            for transfer in self._pending:
                transfer.work = None
