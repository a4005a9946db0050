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


class SideStream:
    """Jobs on the side stream of a device, whose results the caller's stream waits for."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._done: list[Mark] = []
        """The ends of what was put there and is not waited for yet."""

    def aside(self, job: Callable[[], object], grad: Tensor | None = None) -> Callable[[], object]:
        """The job on the side stream; after all that the caller's stream has to do so far, if it reads `grad`."""
        streams, done = self._streams, self._done
        ready = None if grad is None else streams.record()

        def work() -> None:
            with streams.aside():
                if grad is not None:
                    streams.follow(ready)
                    streams.keep(grad)
                job()
                done.append(streams.record())

        return work

    def join(self) -> None:
        """Let the caller's stream wait for the side stream: whoever reads the results finds them written."""
        if self._done:
            self._streams.follow(self._done[-1])
            self._done.clear()


def side_stream_of(x: Tensor) -> SideStream | None:
    """That of the device of x; None if there work is done when the call returns."""
    streams = streams_of(x)
    return None if streams is NONE else SideStream(streams)
