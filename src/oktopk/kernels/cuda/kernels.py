"""The Triton kernels behind `cuda`: what one block of a launch does.

Blocks of a launch write disjoint memory and never wait for each other: what a block needs from the others (where
its output starts) comes from an earlier launch. There are no races, and the output is in order.

Numbers that change from step to step are not specialised: otherwise a count that happens to be a multiple of 16
would compile the kernel again in the middle of training.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(BLOCK: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _chosen(magnitude, threshold, NAN_TOO: tl.constexpr):
    """Whether magnitudes reach the threshold. A NaN counts only with NAN_TOO."""
    if NAN_TOO:
        chosen = ~(magnitude < threshold)
    else:
        chosen = magnitude >= threshold
    return chosen


@triton.jit(do_not_specialize=["size", "blocks"])
def tally(
    x, grad, tallies, size, blocks, threshold, higher,
    ADD: tl.constexpr, KEEP_OLD: tl.constexpr, NAN_TOO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the entries of a block that are selected, at least `higher`, and non-finite.

    With ADD, grad is added to x first; with KEEP_OLD, grad receives the old x.
    """
    at = _places(BLOCK)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0)
    if ADD:
        before = value
        value = before + tl.load(grad + at, mask=inside, other=0)
        tl.store(x + at, value, mask=inside)
        if KEEP_OLD:
            tl.store(grad + at, before, mask=inside)
    magnitude = tl.abs(value)
    chosen = inside & _chosen(magnitude, threshold, NAN_TOO)
    row = tallies + tl.program_id(0)
    tl.store(row, tl.sum(chosen.to(tl.int32)))
    tl.store(row + blocks, tl.sum((inside & (magnitude >= higher)).to(tl.int32)))
    tl.store(row + 2 * blocks, tl.sum((inside & ~(magnitude < float("inf"))).to(tl.int32)))


@triton.jit(do_not_specialize=["size", "capacity", "threshold", "base"])
def compact(
    x, indices, values, ends, out_indices, out_values, size, capacity, threshold, base,
    LISTED: tl.constexpr, NAN_TOO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the selected entries in order, up to the capacity.

    The index of an entry is its position plus base or, with LISTED, that in `indices`. `ends` has the cumulative
    count of selected entries at the end of each block.
    """
    at = _places(BLOCK)
    inside = at < size
    chosen = inside & _chosen(tl.abs(tl.load(x + at, mask=inside, other=0)), threshold, NAN_TOO)
    ones = chosen.to(tl.int32)
    place = tl.load(ends + tl.program_id(0)) - tl.sum(ones) + tl.cumsum(ones) - 1
    stored = chosen & (place < capacity)
    if LISTED:
        index = tl.load(indices + at, mask=stored, other=0)
    else:
        index = at + base
    tl.store(out_indices + place, index, mask=stored)
    tl.store(out_values + place, tl.load(values + at, mask=stored, other=0), mask=stored)


@triton.jit(do_not_specialize=["size", "blocks", "room"])
def scatter_add(out, indices, values, tallies, size, blocks, room, BLOCK: tl.constexpr):
    """Compute out[indices] += values for indices in [0, room).

    `tallies` gets, for each block, the growth of the number of non-zeros and how many indices are out of range.
    """
    at = _places(BLOCK)
    given = at < size
    place = tl.load(indices + at, mask=given, other=0).to(tl.int64)
    inside = given & (place >= 0) & (place < room)
    before = tl.load(out + place, mask=inside, other=0)
    after = before + tl.load(values + at, mask=inside, other=0)
    tl.store(out + place, after, mask=inside)
    growth = (after != 0).to(tl.int32) - (before != 0).to(tl.int32)
    row = tallies + tl.program_id(0)
    tl.store(row, tl.sum(growth))
    tl.store(row + blocks, tl.sum((given & ~inside).to(tl.int32)))


@triton.jit(do_not_specialize=["size", "base", "span"])
def add_to_region(sums, touched, indices, values, tallies, size, base, span, BLOCK: tl.constexpr):
    """Add a sparse part to a dense region that starts at base, and mark the touched entries.

    `tallies` gets the number of indices outside the region for each block.
    """
    at = _places(BLOCK)
    given = at < size
    place = tl.load(indices + at, mask=given, other=0).to(tl.int64) - base
    inside = given & (place >= 0) & (place < span)
    tl.store(tallies + tl.program_id(0), tl.sum((given & ~inside).to(tl.int32)))
    added = tl.load(sums + place, mask=inside, other=0) + tl.load(values + at, mask=inside, other=0)
    tl.store(sums + place, added, mask=inside)
    tl.store(touched + place, 1, mask=inside)
