"""Measure the CPU time to encode, decode and sum messages with the real code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from oktopk.kernels import backend
from oktopk.wire.message import Tag, ValueCode, decode, encode
from oktopk.wire.sparse_vector import SparseVector

from ..trace.replay import Prices

_FEW, _REPEATS = 64, 25


def time_coding(work: torch.Tensor, density: float) -> Prices:
    """Measure seconds per part of a message and per entry, from parts with few and with many entries."""
    size = work.numel()
    many = min(size, max(2 * _FEW, int(size * density)))
    small, large = (_time_message(work, count) for count in (_FEW, many))
    per_entry = [max(0.0, (b - a) / (many - _FEW)) for a, b in zip(small, large, strict=True)]
    per_part = [max(0.0, a - _FEW * entry) for a, entry in zip(small, per_entry, strict=True)]
    chunk = work[: max(1, size // 8)]
    return Prices(
        encode_part=per_part[0],
        encode_entry=per_entry[0],
        decode_part=per_part[1],
        decode_entry=per_entry[1],
        scatter_entry=_time_scatter(work, many) / many,
        add_entry=_time(lambda: chunk.add_(chunk)) / chunk.numel(),
    )


def _time_message(work: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds to encode and to decode a message."""
    size, part = work.numel(), _entries(work, count)
    tag = Tag(0, 0, 0, 0, size, 0, size)
    message, _ = encode(part, tag, ValueCode.FP32)
    return _time(lambda: encode(part, tag, ValueCode.FP32)), _time(lambda: decode(message, tag))


def _time_scatter(work: torch.Tensor, count: int) -> float:
    part = _entries(work, count)
    return _time(lambda: backend(work).scatter_add_(work, part.indices, part.values / 2))


def _entries(work: torch.Tensor, count: int) -> SparseVector:
    """A sparse vector with `count` entries at random positions."""
    size = work.numel()
    places = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count].sort().values
    return SparseVector(places.to(torch.int32), torch.ones(count), size)


def _time(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.thread_time()
        run()
        taken.append(time.thread_time() - start)
    return statistics.median(taken)
