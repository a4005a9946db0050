"""Selection on CPUs, compiled by Numba: one pass over memory.

Large inputs are split into slices for a small thread pool: Numba's threading layers must not be entered from
several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import Picked, index_dtype, threshold_pair
from .vector import WIDTH, block_select, compiled, trailing_zeros

_MIN_SLICE = 1 << 19
_INFINITY = np.float32(np.inf)
_NUMPY_INDEX = {torch.int32: np.int32, torch.int64: np.int64}


@compiled
def select_one(x, grad, old, threshold, higher, base, indices, values):
    """One pass: add grad to x (unless None), store the old x in old (unless None), collect the large entries."""
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
    for i in range(whole, x.size):  # the remainder; sharing the body would slow the loop above by 5 %
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


if hasattr(os, "register_at_fork"):  # a forked child has the pool but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def in_slices(n: int, run: Callable[[int, int], Any]) -> list[Any]:
    """Call run(start, stop) on equal slices of [0, n), one for each torch thread. Results are in order."""
    threads = max(1, min(torch.get_num_threads(), n // _MIN_SLICE))
    if threads == 1:
        return [run(0, n)]
    edges = [n * t // threads // WIDTH * WIDTH for t in range(threads)] + [n]
    futures = [_pool(threads).submit(run, edges[t], edges[t + 1]) for t in range(1, threads)]
    return [run(0, edges[1])] + [future.result() for future in futures]


def select(
    x: Tensor, threshold: float, capacity: int, grad: Tensor | None = None, keep_old: bool = False
) -> Picked:
    """As the reference; `grad`, if given, is added to x in the same pass."""
    dtype = index_dtype(x.numel())
    low, higher = threshold_pair(threshold)

    def run(start: int, stop: int) -> tuple[Any, Any, int, int, bool]:
        room = min(capacity, stop - start)
        indices, values = np.empty(room, _NUMPY_INDEX[dtype]), np.empty(room, np.float32)
        added = None if grad is None else grad[start:stop].numpy()
        old = added if keep_old else None
        found = select_one(x[start:stop].numpy(), added, old, low, higher, start, indices, values)
        stored = min(room, found[0])
        return indices[:stored], values[:stored], *found

    parts = in_slices(x.numel(), run)
    indices, values = parts[0][:2]
    if len(parts) > 1:
        indices = np.concatenate([p[0] for p in parts])[:capacity]
        values = np.concatenate([p[1] for p in parts])[:capacity]
    count, above = (sum(int(p[column]) for p in parts) for column in (2, 3))
    finite = all(p[4] for p in parts)
    return Picked(torch.from_numpy(indices), torch.from_numpy(values), count, above, finite)


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int, keep_old: bool = False
) -> Picked:
    return select(residual, threshold, capacity, grad, keep_old)
