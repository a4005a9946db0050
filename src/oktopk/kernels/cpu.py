"""The kernels for CPUs, compiled by Numba; equal to `reference` to the bit.

Every kernel releases the GIL and keeps no shared state, so that any number of Python threads may be inside.
Large inputs are cut into slices for a small pool of our own: Numba's threading layers must not be entered
from several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import reference
from .types import (
    BIN_BITS,
    SAMPLE,
    SAMPLE_BLOCK,
    SLOPE_STEP,
    Picked,
    float32,
    index_dtype,
    sample_positions,
    sample_rank,
)
from .vector import WIDTH, as_bits, block_select, stream_zeros, trailing_zeros

_MIN_SLICE = 1 << 19
_INFINITY = np.float32(np.inf)
_NUMPY_INDEX = {torch.int32: np.int32, torch.int64: np.int64}

first_equal = reference.first_equal
compiled = njit(nogil=True, cache=True)


# --- selection -----------------------------------------------------------------------------------------------


@compiled
def _select(x, grad, old, threshold, higher, base, indices, values):
    """One pass: add grad to x (unless None), keep x as it was in old (unless None), note what is large."""
    count, above, finite = 0, 0, True
    capacity = indices.size
    whole = x.size // WIDTH * WIDTH
    for start in range(0, whole, WIDTH):
        mask = block_select(x, grad, old, start, threshold)
        while mask:
            i = start + np.int64(trailing_zeros(mask))
            mask &= mask - np.uint32(1)
            value = x[i]
            magnitude = abs(value)
            if count < capacity:
                indices[count] = base + i
                values[count] = value
            count += 1
            above += magnitude >= higher
            finite &= magnitude < _INFINITY
    for i in range(whole, x.size):  # the same once more for the rest: sharing the body costs 5 % in the loop above
        if grad is not None:
            before = x[i]
            x[i] = before + grad[i]
            if old is not None:
                old[i] = before
        value = x[i]
        magnitude = abs(value)
        if not magnitude < threshold:
            if count < capacity:
                indices[count] = base + i
                values[count] = value
            count += 1
            above += magnitude >= higher
            finite &= magnitude < _INFINITY
    return count, above, finite


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="oktopk-kernel")


if hasattr(os, "register_at_fork"):  # a forked child has the pool, but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _in_slices(n: int, run: Callable[[int, int], Any]) -> list[Any]:
    """run(start, stop) over equal slices of [0, n), one per torch thread, results in order."""
    threads = max(1, min(torch.get_num_threads(), n // _MIN_SLICE))
    if threads == 1:
        return [run(0, n)]
    edges = [n * t // threads // WIDTH * WIDTH for t in range(threads)] + [n]
    futures = [_pool(threads).submit(run, edges[t], edges[t + 1]) for t in range(1, threads)]
    return [run(0, edges[1])] + [future.result() for future in futures]


def _run_selection(x: Tensor, grad: Tensor | None, keep_old: bool, threshold: float, capacity: int) -> Picked:
    dtype = index_dtype(x.numel())
    low = float32(threshold)
    higher = float32(float(np.float32(SLOPE_STEP)) * float(low))

    def run(start: int, stop: int) -> tuple[Any, Any, int, int, bool]:
        room = min(capacity, stop - start)
        indices, values = np.empty(room, _NUMPY_INDEX[dtype]), np.empty(room, np.float32)
        added = None if grad is None else grad[start:stop].numpy()
        old = added if keep_old else None
        found = _select(x[start:stop].numpy(), added, old, low, higher, start, indices, values)
        stored = min(room, found[0])
        return indices[:stored], values[:stored], *found

    parts = _in_slices(x.numel(), run)
    indices, values = parts[0][:2]
    if len(parts) > 1:
        indices = np.concatenate([p[0] for p in parts])[:capacity]
        values = np.concatenate([p[1] for p in parts])[:capacity]
    count, above = (sum(int(p[column]) for p in parts) for column in (2, 3))
    finite = all(p[4] for p in parts)
    return Picked(torch.from_numpy(indices), torch.from_numpy(values), count, above, finite)


def select(x: Tensor, threshold: float, capacity: int) -> Picked:
    return _run_selection(x, None, False, threshold, capacity)


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int, keep_old: bool = False
) -> Picked:
    return _run_selection(residual, grad, keep_old, threshold, capacity)


# --- thresholds ----------------------------------------------------------------------------------------------


def _kth_of_few(x: Tensor, k: int) -> float:
    magnitudes = np.abs(x.numpy())
    return float(np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k])


@compiled
def _gather_sample(x, starts, out):
    for b in range(starts.size):
        start = starts[b]
        for j in range(SAMPLE_BLOCK):
            out[b * SAMPLE_BLOCK + j] = x[start + j]


@lru_cache(maxsize=8)
def _positions(n: int) -> Any:
    return sample_positions(n)


def sampled_threshold(x: Tensor, k: int, margin: float = 0.0) -> float:
    n = x.numel()
    if n <= 2 * SAMPLE:
        return _kth_of_few(x, min(n, sample_rank(k, n, n, margin)))
    starts = _positions(n)
    sample = np.empty(starts.size * SAMPLE_BLOCK, np.float32)
    _gather_sample(x.numpy(), starts, sample)
    return _kth_of_few(torch.from_numpy(sample), sample_rank(k, n, sample.size, margin))


def kth_magnitude(x: Tensor, k: int) -> float:
    """Sample, collect in one pass what lies above the estimate, find the k-th among those few."""
    n = x.numel()
    if n <= 2 * SAMPLE or k > n // 4:
        return _kth_of_few(x, k)
    for margin in (1.5, 8.0):
        picked = select(x, sampled_threshold(x, k, margin), 3 * k + SAMPLE)
        if picked.count >= k and picked.complete:
            return _kth_of_few(picked.values, k)
    return _kth_of_few(x, k)


@compiled
def _histogram(x, bin_bits, first, counts):
    last = counts.size - 1
    for i in range(x.size):
        at = np.int64((as_bits(x[i]) & 0x7FFFFFFF) >> bin_bits) - first
        if at >= 0:
            counts[min(at, last)] += 1


def magnitude_histogram(x: Tensor, first: int, bins: int) -> list[int]:
    counts = np.zeros(bins, np.int64)
    _histogram(x.numpy(), BIN_BITS, first, counts)
    return list(counts.tolist())


@compiled
def _filter(indices, values, threshold, out_indices, out_values):
    count = 0
    for j in range(values.size):
        # Written always, kept only if it is large: no branch to mispredict.
        out_indices[count] = indices[j]
        out_values[count] = values[j]
        count += abs(values[j]) >= threshold
    return count


def filter_at_least(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    out_indices, out_values = torch.empty_like(indices), torch.empty_like(values)
    count = _filter(indices.numpy(), values.numpy(), float32(threshold), out_indices.numpy(), out_values.numpy())
    return out_indices[:count], out_values[:count]


@compiled
def _moments(x):
    total, squares = 0.0, 0.0
    for i in range(x.size):
        magnitude = np.float64(abs(x[i]))
        total += magnitude
        squares += magnitude * magnitude
    return total, squares


def magnitude_moments(x: Tensor) -> tuple[float, float]:
    if x.numel() == 0:
        return 0.0, 0.0
    sums = _in_slices(x.numel(), lambda start, stop: _moments(x.numpy()[start:stop]))
    mean = sum(s[0] for s in sums) / x.numel()
    return mean, max(0.0, sum(s[1] for s in sums) / x.numel() - mean * mean) ** 0.5


# --- sparse arithmetic ---------------------------------------------------------------------------------------


@compiled
def _scatter_add(out, indices, values):
    grown = 0
    for j in range(indices.size):
        i = indices[j]
        before = out[i]
        after = before + values[j]
        out[i] = after
        grown += (after != 0) - (before != 0)
    return grown


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    return int(_scatter_add(out.numpy(), indices.numpy(), values.numpy()))


@compiled
def _assign(out, first, indices, values):
    """Zeros go past the caches, in whole blocks from `first` on: they are not read before the optimizer comes."""
    whole = first + (out.size - first) // WIDTH * WIDTH
    for i in range(first):
        out[i] = 0
    for start in range(first, whole, WIDTH):
        stream_zeros(out, start)
    for i in range(whole, out.size):
        out[i] = 0
    found = 0
    for j in range(indices.size):
        out[indices[j]] = values[j]
        found += values[j] != 0
    return found


def assign_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    misaligned = out.data_ptr() % (4 * WIDTH)
    first = min(out.numel(), (4 * WIDTH - misaligned) // 4 if misaligned else 0)
    return int(_assign(out.numpy(), first, indices.numpy(), values.numpy()))


_TILE = 1 << 14
"""Entries of a region that are summed at a time: they stay in the fastest caches."""


@compiled
def _union_sum(indices, values, edges, base, span, sums, touched, out_indices, out_values):
    """Parts lie end to end between the edges. Tile by tile: add all parts, write out what was touched, clear."""
    at = edges[:-1].copy()
    count = 0
    for start in range(0, span, _TILE):
        stop = base + min(start + _TILE, span)
        origin = base + start
        for part in range(at.size):
            j, last = at[part], edges[part + 1]
            while j < last and indices[j] < stop:
                i = indices[j] - origin
                sums[i] += values[j]
                touched[i >> 6] |= np.uint64(1) << np.uint64(i & 63)
                j += 1
            at[part] = j
        for word in range((min(_TILE, span - start) + 63) // 64):
            bits = touched[word]
            touched[word] = 0
            while bits:
                i = word * 64 + np.int64(trailing_zeros(bits))
                bits &= bits - np.uint64(1)
                out_indices[count] = origin + i
                out_values[count] = sums[i]
                sums[i] = 0
                count += 1
    return count


def union_sum(parts: Iterable[tuple[Tensor, Tensor]], base: int, span: int) -> tuple[Tensor, Tensor]:
    every = list(parts)
    indices, values = every[0] if len(every) == 1 else tuple(map(torch.cat, zip(*every, strict=True)))
    edges = np.cumsum([0, *(part.numel() for part, _ in every)])
    room = min(int(edges[-1]), span)
    out_indices, out_values = torch.empty(room, dtype=indices.dtype), torch.empty(room)
    sums, touched = np.zeros(_TILE, np.float32), np.zeros(_TILE // 64, np.uint64)
    count = _union_sum(
        indices.numpy(), values.numpy(), edges, base, span, sums, touched, out_indices.numpy(), out_values.numpy()
    )
    return out_indices[:count], out_values[:count]


@compiled
def _common(a, b, out):
    i, j, count = 0, 0, 0
    while i < a.size and j < b.size:
        mine, other = a[i], b[j]
        # Written always, kept only if equal: no branch to mispredict.
        out[count] = i
        count += mine == other
        i += mine <= other
        j += other <= mine
    return count


def common(a: Tensor, b: Tensor) -> Tensor:
    out = np.empty(min(a.numel(), b.numel()) + 1, np.int64)
    count = _common(a.numpy(), b.numpy(), out)
    return torch.from_numpy(out[:count])
