"""Selection in static shapes by Triton: equal to `kernels.slots` to the bit.

A histogram takes one launch, a compaction two and a scan. The host never waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..slots import COARSE, COARSE_BITS, FINE, FINE_BITS, Cut
from . import BLOCK, on_device_of
from . import slot_kernels as cuda_kernels

TURNS = 16
"""Blocks of a row that one program counts."""


def _blocks(span: int) -> int:
    return -(-span // BLOCK)


def count_coarse(rows: Tensor) -> Tensor:
    return _count(rows, rows, COARSE, 0, COARSE_BITS)


def count_fine(rows: Tensor, coarse_bin: Tensor) -> Tensor:
    return _count(rows, coarse_bin.contiguous(), FINE, COARSE_BITS, FINE_BITS)


def _count(rows: Tensor, only: Tensor, bins: int, outer: int, shift: int) -> Tensor:
    count, span = rows.shape
    counts = torch.zeros(count, bins, dtype=torch.int32, device=rows.device)
    with on_device_of(rows):
        cuda_kernels.count_bins[(count, -(-_blocks(span) // TURNS))](
            rows, only, counts, span, OUTER=outer, SHIFT=shift, BINS=bins, BLOCK=BLOCK, TURNS=TURNS
        )
    return counts


def compact(rows: Tensor, cut: Cut, room: int) -> tuple[Tensor, Tensor]:
    (count, span), device = rows.shape, rows.device
    blocks = _blocks(span)
    tallies = torch.empty(2, count, blocks, dtype=torch.int32, device=device)
    places = torch.full((count, room), span, dtype=torch.int32, device=device)
    values = torch.zeros(count, room, device=device)
    with on_device_of(rows):
        cuda_kernels.tally_cut[(count, blocks)](rows, cut.low, cut.top, tallies, span, count, blocks, BLOCK=BLOCK)
        ends = tallies.cumsum(2, dtype=torch.int32)
        cuda_kernels.write_cut[(count, blocks)](
            rows, cut.low, cut.top, cut.quota, ends, places, values, span, count, blocks, room, BLOCK=BLOCK
        )
    return places, values
