"""The Triton kernels behind `cuda.slots`: what one block of a launch does. Rows are [R, span].

Blocks write disjoint memory, but for counts, which integer atomics add up in any order to the same sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _bits(rows, row, at, span):
    value = tl.load(rows + row.to(tl.int64) * span + at, mask=at < span, other=0)
    return value.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit(do_not_specialize=["span"])
def count_bins(
    rows, only, counts, span,
    OUTER: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Count bits >> SHIFT, modulo BINS. With OUTER, only entries whose bits >> OUTER are the number at `only`."""
    row = tl.program_id(0)
    found = tl.zeros([BINS], dtype=tl.int32)
    for turn in range(TURNS):
        at = (tl.program_id(1) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        bits = _bits(rows, row, at, span)
        inside = at < span
        if OUTER:
            inside = inside & (bits >> OUTER == tl.load(only))
        found += tl.histogram((bits >> SHIFT) & (BINS - 1), BINS, mask=inside)
    places = tl.arange(0, BINS)
    tl.atomic_add(counts + row * BINS + places, found, mask=found > 0, sem="relaxed")


@triton.jit
def _sure_and_edge(bits, low, top, at, span, row):
    inside = at < span
    from_top, from_low = tl.load(top + row), tl.load(low + row)
    sure = inside & (bits >= from_top)
    edge = inside & (bits >= from_low) & (bits < from_top)
    return sure.to(tl.int32), edge.to(tl.int32)


@triton.jit(do_not_specialize=["span", "count", "blocks"])
def tally_cut(rows, low, top, tallies, span, count, blocks, BLOCK: tl.constexpr):
    """How many entries of a block are surely taken, and how many lie at the edge."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    sure, edge = _sure_and_edge(_bits(rows, row, at, span), low, top, at, span, row)
    tl.store(tallies + row * blocks + block, tl.sum(sure))
    tl.store(tallies + (count + row) * blocks + block, tl.sum(edge))


@triton.jit(do_not_specialize=["span", "count", "blocks", "room"])
def write_cut(
    rows, low, top, quota, ends, places, values, span, count, blocks, room, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the entries of a block that are taken, in order. `ends` has the cumulative tallies of its row."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    sure, edge = _sure_and_edge(_bits(rows, row, at, span), low, top, at, span, row)
    sure_until = tl.load(ends + row * blocks + block) - tl.sum(sure) + tl.cumsum(sure)
    edge_until = tl.load(ends + (count + row) * blocks + block) - tl.sum(edge) + tl.cumsum(edge)
    allowed = tl.load(quota + row)
    taken = (sure > 0) | ((edge > 0) & (edge_until <= allowed))
    place = sure_until + tl.minimum(edge_until, allowed) - 1
    stored = taken & (place < room)
    value = tl.load(rows + row.to(tl.int64) * span + at, mask=stored, other=0)
    tl.store(places + row * room + place, at, mask=stored)
    tl.store(values + row * room + place, value, mask=stored)
