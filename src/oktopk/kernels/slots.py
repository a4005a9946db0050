"""Selection in static shapes, in torch: no call makes the host wait, and no shape depends on data.

The definition of what `cuda.slots` computes. Rows are float32 [R, span]; magnitudes are compared by their bits, in
which positive floats are ordered as they are by value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COARSE_BITS, FINE_BITS = 20, 10
"""Low bits that a coarse bin (8 per octave) and a fine one (8192 per octave) leave out."""
COARSE, FINE = 1 << (31 - COARSE_BITS), 1 << (COARSE_BITS - FINE_BITS)
"""Number of coarse bins, and of fine bins in each of them."""
SMALLEST_BITS, INFINITY_BITS = 0x00800000, 0x7F800000
"""Of the smallest normal number, and of infinity."""


class Cut(NamedTuple):
    """What a selection takes of each row: magnitudes from `top` on, and the first `quota` ones in [low, top).

    All three are [R], the first two as bits of floats.
    """

    low: Tensor
    top: Tensor
    quota: Tensor


def magnitude_bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int32) & 0x7FFFFFFF


def count_coarse(rows: Tensor) -> Tensor:
    """How many entries of each row lie in each coarse bin: [R, COARSE], int32."""
    return _count(magnitude_bits(rows) >> COARSE_BITS, COARSE)


def count_fine(rows: Tensor, coarse_bin: Tensor) -> Tensor:
    """How many entries of each row lie in each fine bin of one coarse bin (0-d): [R, FINE], int32."""
    bits = magnitude_bits(rows)
    inside = bits >> COARSE_BITS == coarse_bin
    return _count(torch.where(inside, (bits >> FINE_BITS) & (FINE - 1), FINE), FINE + 1)[:, :FINE]


def _count(bins: Tensor, number: int) -> Tensor:
    counts = torch.zeros(bins.shape[0], number, dtype=torch.int32, device=bins.device)
    one = torch.ones((), dtype=torch.int32, device=bins.device)
    return counts.scatter_add_(1, bins.long(), one.expand(bins.shape))


def compact(rows: Tensor, cut: Cut, room: int) -> tuple[Tensor, Tensor]:
    """The places (int32) and values of the entries that a cut takes, in order, at most `room` of each row.

    Both are [R, room]. An empty slot has place `span` and value 0.
    """
    span = rows.shape[1]
    bits = magnitude_bits(rows)
    sure = bits >= cut.top[:, None]
    edge = (bits >= cut.low[:, None]) & ~sure
    taken = sure | (edge & (edge.cumsum(1, dtype=torch.int32) <= cut.quota[:, None]))
    number = torch.arange(1, room + 1, dtype=torch.int32, device=rows.device).expand(rows.shape[0], room)
    places = torch.searchsorted(taken.cumsum(1, dtype=torch.int32), number.contiguous())
    values = rows.gather(1, places.clamp(max=span - 1))
    return places.int(), torch.where(places < span, values, 0.0)
