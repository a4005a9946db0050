"""Types and constants that all kernels share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

SLOPE_STEP = 1.05
"""A selection also counts the entries above SLOPE_STEP times its threshold, to measure the slope of the tail."""

SMALLEST = float(np.finfo(np.float32).tiny)
"""Entries below the smallest normal number, zeros included, are never sent."""

BIN_BITS = 15
"""Magnitudes are binned by their float bits without the lowest BIN_BITS: 256 bins per octave."""

OUTSIDE = "indices out of order or out of range"
"""Every kernel that writes by index checks each one in passing: no vector, whoever made it, can corrupt memory.
No entry is dropped silently either."""


@dataclass(frozen=True)
class Picked:
    """Entries at or above a threshold, in index order.

    Attributes:
        indices: Indices of the stored entries.
        values: Their values.
        count: Entries at or above the threshold; more than stored if the capacity was too small.
        above: Entries at or above SLOPE_STEP times the threshold.
        finite: False if the input has a NaN or an infinity; the other fields are then meaningless.
    """

    indices: Tensor
    values: Tensor
    count: int
    above: int
    finite: bool

    @property
    def complete(self) -> bool:
        """Whether all entries were stored."""
        return self.count == self.indices.numel()


def float32(x: float) -> np.float32:
    """Round to float32. A number that is too large becomes infinity."""
    return np.float32(ctypes.c_float(x).value)


def threshold_pair(threshold: float) -> tuple[np.float32, np.float32]:
    """The threshold and SLOPE_STEP times the threshold, both rounded to float32."""
    low = float32(threshold)
    return low, float32(float(np.float32(SLOPE_STEP)) * float(low))


def bin_of(magnitude: float) -> int:
    """The bin of a magnitude. Bins are ordered like magnitudes."""
    return int(float32(magnitude).view(np.uint32)) >> BIN_BITS


def bin_edge(index: int) -> float:
    """The smallest magnitude of a bin."""
    return float(np.uint32(index << BIN_BITS).view(np.float32))


def index_dtype(size: int) -> torch.dtype:
    return torch.int32 if size < 2**31 else torch.int64


def padded(size: int) -> int:
    """Round up to a multiple of 8."""
    return (size + 7) // 8 * 8


def elias_fano_bytes(count: int, span: int, low: int) -> int:
    low_words, high_words = elias_fano_words(count, span, low)
    return 8 * (low_words + high_words)


def elias_fano_words(count: int, span: int, low: int) -> tuple[int, int]:
    """64-bit words of the two streams: `low` bits of each offset, and one bit per entry and per high part."""
    return (count * low + 63) // 64, (count + (span >> low) + 1 + 63) // 64


def edges_of(pieces: Sequence[Tensor]) -> list[int]:
    """The start of each piece, and the end of the last one."""
    return [0, *accumulate(piece.numel() for piece in pieces)]
