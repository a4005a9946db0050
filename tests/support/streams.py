"""Streams of a device that does not exist, checked by torch's own sanitizer on the real code.

A stream is a number, current in one thread; operations on tensors that are watched are reported to the sanitizer
as kernels of that stream. What the host reads does not count as synchronisation: order must come from events.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.cuda._sanitizer import ArgumentHandler, EventHandler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SIDE = 99


class CheckedStreams:
    """Takes the place of oktopk.utils.streams.CudaStreams.

    Args:
        broken: which event is left out: "ready", that the side stream waits for, or "done", that the caller does.
    """

    def __init__(self, broken: str | None = None) -> None:
        self._handler, self._lock, self._local = EventHandler(), threading.Lock(), threading.local()
        self._numbers, self._broken = itertools.count(1), broken
        self._made: set[int] = set()
        self.watched: set[int] = set()
        self.kept: set[tuple[int, int]] = set()
        """Memory and streams that the allocator was told of."""
        self.errors: list[str] = []
        self.kernels: set[int] = set()
        """Streams that had something to do."""

    @property
    def current(self) -> int:
        return getattr(self._local, "stream", 0)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        with self._lock:
            if stream not in self._made:
                self._made.add(stream)
                self._handler._handle_stream_creation(stream)
        try:
            with _Kernels(self):
                yield
        finally:
            self._local.stream = before

    def watch(self, *tensors: Tensor) -> None:
        self.watched |= {x.untyped_storage().data_ptr() for x in tensors}

    # What the library calls.

    def record(self) -> int:
        with self._lock:
            mark = next(self._numbers)
            self._handler._handle_event_creation(mark)
            self._handler._handle_event_record(mark, self.current)
            return mark

    def follow(self, mark: int) -> None:
        with self._lock:
            if self._broken != ("ready" if self.current == SIDE else "done"):
                self._handler._handle_event_wait(mark, self.current)

    def aside(self) -> Any:
        return self.on(SIDE)

    def keep(self, x: Tensor) -> None:
        self.kept.add((x.untyped_storage().data_ptr(), self.current))

    def launch(self, name: str, seen: ArgumentHandler) -> None:
        with self._lock:
            self.kernels.add(self.current)
            found = self._handler._handle_kernel_launch(
                self.current, seen.dataptrs_read - seen.dataptrs_written, seen.dataptrs_written, seen.outputs,
                name, seen.tensor_aliases,
            )  # fmt: skip
            for before in (error.previous_access for error in found):
                self.errors.append(f"{name} on {self.current} beside {before.operator} on {before.stream}")


class _Watched(ArgumentHandler):
    """The sanitizer's, for CPU tensors: only the memory that is watched."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self.watched = watched

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, Tensor) or not value.numel():
            return
        pointer = value.untyped_storage().data_ptr()
        if pointer not in self.watched or metadata_only:
            return
        (self.dataptrs_written if is_write else self.dataptrs_read).add(pointer)
        self.tensor_aliases.setdefault(pointer, []).append(name or "")
        if is_output:
            self.outputs.add(pointer)


class _Kernels(TorchDispatchMode):
    """Reports every operation as a kernel of the current stream."""

    def __init__(self, streams: CheckedStreams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_factory = not any(isinstance(a, Tensor) for a in pytree.tree_leaves((args, kwargs)))
        seen = _Watched(self.streams.watched)
        seen.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        out = func(*args, **kwargs)
        seen.parse_outputs(func._schema, out, is_factory=is_factory)
        if seen.dataptrs_read or seen.dataptrs_written:
            self.streams.launch(func._schema.name, seen)
        return out


class Delivered:
    """A bucket as DDP delivers it to its hook."""

    def __init__(self, index: int, last: bool, flat: Tensor, parameters: list[torch.nn.Parameter]) -> None:
        self._index, self._last, self._flat, self._parameters = index, last, flat, parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._flat

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters
