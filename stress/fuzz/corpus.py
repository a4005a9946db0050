"""Real messages to start from: every index code, value code and type of index, up to some hundred entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from unittest import mock

import numpy as np
import torch

from oktopk.kernels import coding, types
from oktopk.kernels.coding import IndexCode
from oktopk.kernels.values import Array, ValueCode
from oktopk.wire import message as wire
from oktopk.wire.message import Tag
from oktopk.wire.sparse_vector import SparseVector

COUNTS = (0, 1, 2, 7, 33, 150)
SPARSITIES = (1, 3, 90, 5000)
"""Entries of the region for one of the message."""
STARTS = (0, 2**31 - 800_000, 2**40 - 7)
"""Of the region. Indices from the second one on come close to the end of 32 bits, from the third one beyond."""
LARGEST_OFFSET = 2**32 - 1


@dataclass(frozen=True)
class Real:
    """A message as a sender wrote it, and what its receiver expects."""

    message: bytes
    tag: Tag
    index_code: IndexCode
    value_code: ValueCode


@cache
def corpus() -> tuple[Real, ...]:
    """Always the same messages in the same order: the number of a case counts on it."""
    random = np.random.default_rng(7)
    return tuple(real for start in STARTS for real in _of_regions(start, random))


def _of_regions(start: int, random: np.random.Generator) -> Iterator[Real]:
    for count in COUNTS:
        for sparsity in SPARSITIES:
            span = max(1, count * sparsity)
            yield from _of_region(np.sort(random.choice(span, count, replace=False)), start, span, random)
    ends = np.array([0, 1, LARGEST_OFFSET - 1])
    yield from _of_region(ends, start, LARGEST_OFFSET, random)


def _of_region(offsets: Array, start: int, span: int, random: np.random.Generator) -> Iterator[Real]:
    """The same entries in every code that can hold them."""
    size = start + span + 5
    indices = torch.from_numpy((offsets + start).astype(np.int32 if size < 2**31 else np.int64))
    part = SparseVector(indices, torch.from_numpy(random.standard_normal(len(offsets)).astype(np.float32)), size)
    for code, low in _codes(len(offsets), span):
        for values in ValueCode:
            tag = Tag(int(random.integers(10**6)), 3, 2, 5, size, start, span)
            yield Real(_encoded(part, tag, code, low, values), tag, code, values)


def _codes(count: int, span: int) -> Iterator[tuple[IndexCode, int]]:
    if count == span:
        yield IndexCode.FULL, 0
    for code in (IndexCode.RAW32, IndexCode.RAW64, IndexCode.DELTA8, IndexCode.DELTA16):
        yield code, 0
    tightest = max(0, (span // max(1, count)).bit_length() - 1)
    for low in sorted({tightest, 8, 16, 31}):
        if types.elias_fano_bytes(count, span, low) <= 4096:
            yield IndexCode.ELIAS_FANO, low


def _encoded(part: SparseVector, tag: Tag, code: IndexCode, low: int, values: ValueCode) -> bytes:
    """By the library, told which index code to take; in NumPy, so that no kernel is compiled that only writes."""
    size = index_bytes(part.indices.numpy(), tag, code, low)
    chosen = mock.patch.object(wire, "best_index_code", return_value=(code, size, low))
    with chosen, mock.patch.object(wire, "codes", coding):
        message = wire.encode(part, tag, values, nonfinite=tag.step % 2 == 1)[0]
    return message.numpy().tobytes()


def index_bytes(indices: Array, tag: Tag, code: IndexCode, low: int) -> int:
    one, two = coding.escapes(indices, tag.start)
    return {
        IndexCode.RAW32: 4 * indices.size,
        IndexCode.RAW64: 8 * indices.size,
        IndexCode.DELTA8: indices.size + 4 * one,
        IndexCode.DELTA16: 2 * indices.size + 4 * two,
        IndexCode.ELIAS_FANO: types.elias_fano_bytes(indices.size, tag.span, low),
        IndexCode.FULL: 0,
    }[code]
