"""Sparse vector arithmetic on CPUs: filter, add, assign, sum, intersect."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from ..types import OUTSIDE, float32
from .vector import WIDTH, compiled, pointer, prefetch, stream_block, trailing_zeros

_ONE = np.float32(1)
_AHEAD = 24
"""Prefetch distance in entries: they lie far apart, which defeats the hardware prefetcher."""


@compiled
def _filter(indices, values, threshold, out_indices, out_values):
    count = 0
    for j in range(values.size):
        # Always written, kept only if large enough: no branch to mispredict.
        out_indices[count] = indices[j]
        out_values[count] = values[j]
        count += abs(values[j]) >= threshold
    return count


def filter_at_least(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    out_indices, out_values = torch.empty_like(indices), torch.empty_like(values)
    count = _filter(indices.numpy(), values.numpy(), float32(threshold), out_indices.numpy(), out_values.numpy())
    return out_indices[:count], out_values[:count]


@compiled
def _within(indices, base, size):
    """A vectorised pass of its own: a branch in the loop of random accesses takes longer."""
    low, high = np.int64(base), np.int64(base)
    for j in range(indices.size):
        low = min(low, np.int64(indices[j]))
        high = max(high, np.int64(indices[j]))
    return low >= base and (indices.size == 0 or high - base < size)


@compiled
def add_one(out, indices, values, base, factor):
    """Compute out += factor * values, with indices relative to `base`. Returns the growth of the non-zeros."""
    if not _within(indices, base, out.size):
        raise ValueError(OUTSIDE)
    grown = 0
    for j in range(indices.size):
        prefetch(out, np.int64(indices[min(j + _AHEAD, indices.size - 1)]) - base)
        i = np.uint64(indices[j] - base)
        before = out[i]
        after = before + factor * values[j]
        out[i] = after
        grown += (after != 0) - (before != 0)
    return grown


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    return int(add_one(out.numpy(), indices.numpy(), values.numpy(), 0, _ONE))


_SHEET = 1 << 12
"""Entries of a result assembled at a time, in the L1 cache."""


@compiled
def assign_one(out, address, indices, values, base, factor):
    """Overwrite out with factor * values by non-temporal stores of aligned blocks: nothing reads it back soon.

    The result is assembled sheet by sheet; the entries of a sheet are cleared for the next one.
    """
    first = min(out.size, -address % (4 * WIDTH) // 4)
    whole = first + (out.size - first) // WIDTH * WIDTH
    sheet = np.zeros(_SHEET, np.float32)
    j, found = _assign_plain(out, 0, first, indices, values, base, factor, 0)
    for start in range(first, whole, _SHEET):
        stop = min(start + _SHEET, whole)
        begin, origin = j, base + start
        while j < indices.size and indices[j] < base + stop:
            value = factor * values[j]
            i = np.uint64(indices[j] - origin)
            if i >= np.uint64(stop - start):
                raise ValueError(OUTSIDE)
            sheet[i] = value
            found += value != 0
            j += 1
        for block in range(0, stop - start, WIDTH):
            stream_block(out, start + block, sheet, block)
        for done in range(begin, j):
            sheet[np.uint64(indices[done] - origin)] = 0
    j, rest = _assign_plain(out, whole, out.size, indices, values, base, factor, j)
    if j < indices.size:
        raise ValueError(OUTSIDE)
    return found + rest


@compiled
def _assign_plain(out, start, stop, indices, values, base, factor, j):
    """The same from start to stop with plain stores. Returns the next entry and the number of non-zeros."""
    found = 0
    for place in range(start, stop):
        out[place] = 0
    while j < indices.size and indices[j] < base + stop:
        value = factor * values[j]
        i = np.uint64(indices[j] - base)
        if i >= np.uint64(stop):
            raise ValueError(OUTSIDE)
        out[i] = value
        found += value != 0
        j += 1
    return j, found


def assign_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    return int(assign_one(out.numpy(), out.data_ptr(), indices.numpy(), values.numpy(), 0, _ONE))


_TILE = 1 << 14
"""Entries of a region summed at a time: they stay in the L1 and L2 caches."""


@compiled
def _union_sum(index_at, value_at, sizes, base, span, sums, touched, out_indices, out_values):
    """Sum the parts at these addresses tile by tile: add all parts, write the touched entries, clear them."""
    at = np.zeros_like(sizes)
    count = 0
    for start in range(0, span, _TILE):
        stop = base + min(start + _TILE, span)
        origin = base + start
        for part in range(at.size):
            j, size = at[part], sizes[part]
            indices = carray(pointer(index_at[part], out_indices), size)
            values = carray(pointer(value_at[part], out_values), size)
            while j < size and indices[j] < stop:
                i = np.uint64(indices[j] - origin)
                if i >= np.uint64(_TILE):
                    raise ValueError(OUTSIDE)
                sums[i] += values[j]
                touched[i >> np.uint64(6)] |= np.uint64(1) << (i & np.uint64(63))
                j += 1
            at[part] = j
        for word in range((min(_TILE, span - start) + 63) // 64):
            bits = touched[word]
            touched[word] = 0
            while bits:
                i = np.uint64(word * 64) + trailing_zeros(bits)
                bits &= bits - np.uint64(1)
                out_indices[count] = origin + np.int64(i)
                out_values[count] = sums[i]
                sums[i] = 0
                count += 1
    for part in range(at.size):
        if at[part] < sizes[part]:
            raise ValueError(OUTSIDE)
    return count


def union_sum(parts: Iterable[tuple[Tensor, Tensor]], base: int, span: int) -> tuple[Tensor, Tensor]:
    every = [(indices.contiguous(), values.contiguous()) for indices, values in parts]
    dtype, sizes = every[0][0].dtype, np.array([indices.numel() for indices, _ in every])
    for indices, values in every:  # compiled code trusts their addresses
        typed = indices.dtype == dtype and values.dtype == torch.float32 and indices.is_cpu and values.is_cpu
        if not typed or indices.numel() != values.numel():
            raise ValueError(f"cannot sum parts of {dtype}, float32 with {indices.dtype}, {values.dtype}")
    room = min(int(sizes.sum()), span)
    out_indices, out_values = torch.empty(room, dtype=dtype), torch.empty(room)
    sums, touched = np.zeros(_TILE, np.float32), np.zeros(_TILE // 64, np.uint64)
    index_at, value_at = (np.array([part[kind].data_ptr() for part in every]) for kind in (0, 1))
    count = _union_sum(
        index_at, value_at, sizes, base, span, sums, touched, out_indices.numpy(), out_values.numpy()
    )
    return out_indices[:count], out_values[:count]


@compiled
def _compare(indices, values, others, i, j, count, out_indices, out_values):
    """One step of a merge. The entry is always written, and kept only if equal: no branch to mispredict."""
    mine, other = indices[i], others[j]
    out_indices[count], out_values[count] = mine, values[i]
    return i + (mine <= other), j + (other <= mine), count + (mine == other)


@compiled
def _common(indices, values, others, out_indices, out_values):
    """Intersect both halves in one loop: a single merge depends on its own last step and leaves the CPU idle."""
    half = indices.size // 2
    cut = np.searchsorted(others, indices[half]) if indices.size else 0
    i, j, count = 0, 0, 0
    k, m, behind = half, cut, half
    while i < half and j < cut and k < indices.size and m < others.size:
        i, j, count = _compare(indices, values, others, i, j, count, out_indices, out_values)
        k, m, behind = _compare(indices, values, others, k, m, behind, out_indices, out_values)
    while i < half and j < cut:
        i, j, count = _compare(indices, values, others, i, j, count, out_indices, out_values)
    while k < indices.size and m < others.size:
        k, m, behind = _compare(indices, values, others, k, m, behind, out_indices, out_values)
    for at in range(half, behind):
        out_indices[count], out_values[count] = out_indices[at], out_values[at]
        count += 1
    return count


def common(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    out_indices, out_values = torch.empty_like(indices), torch.empty_like(values)
    count = _common(
        indices.numpy(), values.numpy(), others.numpy(), out_indices.numpy(), out_values.numpy()
    )  # fmt: skip
    return out_indices[:count], out_values[:count]
