"""Magnitudes on CPUs: the k-th largest, histograms, moments, the maximum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import BIN_BITS, float32
from .selection import in_slices, select
from .vector import as_bits, as_float, compiled

SAMPLE = 1 << 18
"""Entries a threshold is estimated from; large enough for 2 % accuracy at 1 % density."""

SAMPLE_BLOCK = 16
"""Neighbours sampled together: one cache line of floats."""


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
def sample_positions(size: int) -> Any:
    """First positions of the cache lines that a sample of `size` entries reads: evenly spread, jittered.

    The jitter is the same on every call, so that equal inputs give equal thresholds.
    """
    blocks = SAMPLE // SAMPLE_BLOCK
    stride = size / blocks
    jitter = np.random.default_rng(0).random(blocks) * max(stride - SAMPLE_BLOCK, 0.0)
    starts = (np.arange(blocks) * stride + jitter).astype(np.int64)
    return np.minimum(starts, size - SAMPLE_BLOCK)


def sampled_threshold(x: Tensor, k: int, margin: float = 0.0) -> float:
    """Estimate the k-th largest magnitude of more than SAMPLE entries, `margin` deviations on the low side.

    Neighbours are alike, so the deviation is taken three times as large as for independent draws.
    """
    starts = sample_positions(x.numel())
    sample = np.empty(starts.size * SAMPLE_BLOCK, np.float32)
    _gather_sample(x.numpy(), starts, sample)
    expected = k * sample.size / x.numel()
    rank = min(sample.size, max(1.0, round(expected + margin * 3.0 * expected**0.5)))
    return _kth_of_few(torch.from_numpy(sample), int(rank))


def kth_magnitude(x: Tensor, k: int) -> float:
    """Estimate a threshold from a sample, collect what lies above it in one pass, and select among those few."""
    n = x.numel()
    if n <= 2 * SAMPLE:
        return _kth_of_few(x, k)
    for margin in (1.5, 8.0) if k <= n // 4 else ():
        picked = select(x, sampled_threshold(x, k, margin), 3 * k + SAMPLE)
        if picked.count >= k and picked.complete:
            return _kth_of_few(picked.values, k)
    return _kth_by_bits(x, k)


@compiled
def _count_digits(x, shift, width, prefix, counts):
    """Count the magnitudes whose bits begin with prefix by the next `width` bits, those from `shift` on."""
    mask = (np.uint32(1) << width) - np.uint32(1)
    for i in range(x.size):
        bits = as_bits(x[i]) & np.uint32(0x7FFFFFFF)
        if bits >> (shift + width) == prefix:
            counts[np.uint64((bits >> shift) & mask)] += 1
    return counts


def _kth_by_bits(x: Tensor, k: int) -> float:
    """Two passes, and no copy of x: magnitudes are ordered like their bits, of which each pass finds some."""
    prefix, whole = 0, x.numpy()
    for shift, width in ((15, 16), (0, 15)):

        def count(start: int, stop: int, shift: int = shift, width: int = width, prefix: int = prefix) -> Any:
            counts = np.zeros(1 << width, np.int64)
            digits = np.uint32(shift), np.uint32(width), np.uint32(prefix)
            return _count_digits(whole[start:stop], *digits, counts)

        from_top = np.sum(in_slices(x.numel(), count), 0)[::-1].cumsum()
        place = int(np.searchsorted(from_top, k))
        k -= int(from_top[place - 1]) if place else 0
        prefix = prefix << width | ((1 << width) - 1 - place)
    return float(np.uint32(prefix).view(np.float32))


_ROWS = 4


@compiled
def _histogram(x, first, counts):
    """Bin 0 counts everything below. Neighbours use different rows: repeated updates of one counter are slow."""
    below, last = np.int64(first - 1), np.int64(counts.shape[1] - 1)
    for i in range(x.size):
        at = np.int64((as_bits(x[i]) & np.uint32(0x7FFFFFFF)) >> np.uint32(BIN_BITS))
        place = min(max(at - below, np.int64(0)), last)
        counts[i & (_ROWS - 1), np.uint64(place)] += 1


def magnitude_histogram(x: Tensor, first: int, bins: int) -> list[int]:
    counts = np.zeros((_ROWS, bins + 1), np.int64)
    _histogram(x.numpy(), first, counts)
    return list(counts.sum(0)[1:].tolist())


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
    sums = in_slices(x.numel(), lambda start, stop: _moments(x.numpy()[start:stop]))
    mean = sum(s[0] for s in sums) / x.numel()
    return mean, max(0.0, sum(s[1] for s in sums) / x.numel() - mean * mean) ** 0.5


@compiled
def _scale(x, factor):
    """Magnitudes are ordered like their bits, NaN above all. LLVM vectorises the maximum of signed integers."""
    largest = np.int32(0)
    for i in range(x.size):
        value = x[i] * factor
        x[i] = value
        magnitude = np.int32(as_bits(value) & np.uint32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    return as_float(np.uint32(largest))


def scale_(x: Tensor, factor: float) -> float:
    by, whole = float32(factor), x.detach().numpy()
    found = in_slices(x.numel(), lambda start, stop: _scale(whole[start:stop], by))
    return float(found[0] if len(found) == 1 else np.max(found))
