"""What kernels take and give; shared by every backend."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SLOPE_STEP = 1.05
"""A selection also counts the entries above SLOPE_STEP times its threshold: the slope of the tail."""

SMALLEST = float(np.finfo(np.float32).tiny)
"""Entries below the smallest normal number are never worth sending; exact zeros are among them."""

BIN_BITS = 15
"""Magnitudes are binned by their float bits without the lowest BIN_BITS: 256 bins per factor of two."""

SAMPLE = 1 << 18
"""Entries a threshold is estimated from; large enough for 2 % accuracy at 1 % density."""

SAMPLE_BLOCK = 16
"""Neighbours sampled together: one cache line of floats."""


@dataclass(frozen=True)
class Picked:
    """Entries at or above a threshold, in index order.

    `count` is how many there are, also when fewer were stored for want of capacity. `above` counts those at
    or above SLOPE_STEP times the threshold. When `finite` is false the input holds a NaN or an infinity and
    nothing else in here means anything.
    """

    indices: Tensor
    values: Tensor
    count: int
    above: int
    finite: bool

    @property
    def complete(self) -> bool:
        return self.count == self.indices.numel()


def float32(x: float) -> np.float32:
    """Rounded to float32; what is too large becomes infinity."""
    return np.float32(ctypes.c_float(x).value)


def bin_of(magnitude: float) -> int:
    """The bin a magnitude falls into; bins are ordered like magnitudes."""
    return int(float32(magnitude).view(np.uint32)) >> BIN_BITS


def bin_edge(index: int) -> float:
    """The smallest magnitude of a bin."""
    return float(np.uint32(index << BIN_BITS).view(np.float32))


def index_dtype(size: int) -> torch.dtype:
    return torch.int32 if size < 2**31 else torch.int64


def sample_positions(size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """First positions of the cache lines a sample of `size` entries looks at: evenly spread, jittered.

    The jitter is the same on every call, so that equal inputs give equal thresholds.
    """
    blocks = SAMPLE // SAMPLE_BLOCK
    stride = size / blocks
    jitter = np.random.default_rng(0).random(blocks) * max(stride - SAMPLE_BLOCK, 0.0)
    starts = (np.arange(blocks) * stride + jitter).astype(np.int64)
    return np.minimum(starts, size - SAMPLE_BLOCK)


def sample_rank(k: int, size: int, sampled: int, margin: float = 0.0) -> int:
    """Rank in a sample that corresponds to rank k of the whole, `margin` standard deviations further down.

    Neighbours are alike, so the deviation is taken three times as large as for independent draws.
    """
    expected = k * sampled / size
    return int(min(sampled, max(1.0, round(expected + margin * 3.0 * expected**0.5))))
