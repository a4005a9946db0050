"""CUDA streams: which work waits for which, and whose memory is in use where. On CPUs all of it is nothing.

    caller     fill bucket ── record ─┐                          ┌─ join ── optimizer reads
    worker                            └─ follow ── reduce ── … ──┘ record

The worker has a stream of its own, so that its kernels run beside those of backward. A tensor that was made on
one stream and is used on another one is `kept` there: the allocator must not give its memory away before that
stream is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any
"""A point in the work of a stream, which another one can wait for."""


class Streams(Protocol):
    """The streams of one device."""

    def record(self) -> Mark:
        """Mark all that the current stream has to do so far."""

    def follow(self, mark: Mark) -> None:
        """Let the current stream wait until the mark is reached; the host does not wait."""

    def aside(self) -> AbstractContextManager[object]:
        """A block whose work goes to the side stream."""

    def keep(self, x: Tensor) -> None:
        """The current stream uses the memory of x: it must not be given away before that is over."""


class NoStreams:
    """Of a CPU: work is done when the call returns."""

    def record(self) -> Mark:
        return None

    def follow(self, mark: Mark) -> None:
        pass

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def keep(self, x: Tensor) -> None:
        pass


class CudaStreams:
    """Of one GPU, with one side stream for all threads: what they put there is done in that order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self) -> Mark:
        mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def follow(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side)

    def keep(self, x: Tensor) -> None:
        x.record_stream(torch.cuda.current_stream(self._device))


NONE = NoStreams()


@cache
def _streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else NONE


find: Callable[[torch.device], Streams] = _streams_of
"""Replaced by the tests, which check streams of a device that does not exist."""


def streams_of(x: Tensor) -> Streams:
    """The streams of the device of x."""
    return find(x.device)
