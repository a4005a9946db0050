"""The kernels for GPUs, compiled by Triton; equal to `reference` to the bit.

Selection takes three launches: count per block, cumulative sum, write each block's entries. The host reads all
scalar results of a kernel in one transfer, the only point where it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from .. import reference
from ..pieces import put_in_turn, select_in_turn
from ..types import BIN_BITS, OUTSIDE, Picked, float32, index_dtype, threshold_pair
from . import kernels as cuda_kernels

BLOCK = 1024
"""Entries per program of a launch."""

_TOUCHED = 0.5
"""Threshold between touched entries, marked 1, and others, marked 0."""

first_equal = reference.first_equal
kth_magnitude = reference.kth_magnitude
magnitude_moments = reference.magnitude_moments
common = reference.common
assign_ = reference.assign_
scale_ = reference.scale_


def _blocks(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device current: kernels launch on the current device, in a new thread device 0."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _tally(
    x: Tensor, threshold: float, higher: float,
    grad: Tensor | None = None, keep_old: bool = False, nan: bool = True,
) -> Tensor:  # fmt: skip
    """Cumulative counts by block: entries selected, at least `higher`, and non-finite. x must not be empty."""
    blocks = _blocks(x)
    tallies = torch.empty(3, blocks, dtype=torch.int32, device=x.device)
    cuda_kernels.tally[(blocks,)](
        x, x if grad is None else grad, tallies, x.numel(), blocks, threshold, higher,
        ADD=grad is not None, KEEP_OLD=keep_old, NAN_TOO=nan, BLOCK=BLOCK,
    )  # fmt: skip
    return tallies.cumsum(1)


def _compact(
    x: Tensor, values: Tensor, out: tuple[Tensor, Tensor], ends: Tensor, threshold: float,
    listed: Tensor | None = None, base: int = 0, nan: bool = True,
) -> None:  # fmt: skip
    """Write the indices and values of the entries that `_tally` counted in x to `out`, up to its capacity."""
    cuda_kernels.compact[(_blocks(x),)](
        x, x if listed is None else listed, values, ends, *out, x.numel(), out[0].numel(), threshold, base,
        LISTED=listed is not None, NAN_TOO=nan, BLOCK=BLOCK,
    )  # fmt: skip


# --- selection -----------------------------------------------------------------------------------------------


def select(
    x: Tensor, threshold: float, capacity: int, grad: Tensor | None = None, keep_old: bool = False
) -> Picked:
    """As the reference; `grad`, if given, is added to x in the same pass."""
    low, higher = map(float, threshold_pair(threshold))
    room = min(capacity, x.numel())
    indices = torch.empty(room, dtype=index_dtype(x.numel()), device=x.device)
    values = torch.empty(room, device=x.device)
    if x.numel() == 0:
        return Picked(indices, values, 0, 0, True)
    with on_device_of(x):
        ends = _tally(x, low, higher, grad, keep_old)
        if room:
            _compact(x, x, (indices, values), ends, low)
        count, above, bad = ends[:, -1].tolist()
    return Picked(indices[:count], values[:count], count, above, bad == 0)


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int, keep_old: bool = False
) -> Picked:
    return select(residual, threshold, capacity, grad, keep_old)


def magnitude_histogram(x: Tensor, first: int, bins: int) -> list[int]:
    """Like the reference, without masks and maxima, each of which would make the host wait."""
    at = (x.abs().view(torch.int32) >> BIN_BITS).long() - first
    counts = torch.zeros(1 + bins, dtype=torch.int64, device=x.device)  # the first: below all bins
    counts.scatter_add_(0, at.clamp_(-1, bins - 1) + 1, torch.ones_like(at))
    return list(counts[1:].tolist())


# --- sparse arithmetic ---------------------------------------------------------------------------------------


def filter_at_least(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    if values.numel() == 0:
        return indices, values
    low = float(float32(threshold))
    out = torch.empty_like(indices), torch.empty_like(values)
    with on_device_of(values):
        ends = _tally(values, low, low, nan=False)
        _compact(values, values, out, ends, low, listed=indices, nan=False)
        count = int(ends[0, -1])
    return out[0][:count], out[1][:count]


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    blocks = _blocks(indices)
    if blocks == 0:
        return 0
    with on_device_of(out):
        tallies = torch.empty(2, blocks, dtype=torch.int32, device=out.device)
        cuda_kernels.scatter_add[(blocks,)](
            out, indices, values, tallies, indices.numel(), blocks, out.numel(), BLOCK=BLOCK
        )
        grown, outside = tallies.sum(1).tolist()
    if outside:
        raise ValueError(OUTSIDE)
    return int(grown)


def union_sum(parts: Iterable[tuple[Tensor, Tensor]], base: int, span: int) -> tuple[Tensor, Tensor]:
    first, rest = next(iterator := iter(parts)), iterator
    sums = torch.zeros(span, device=first[1].device)
    touched = torch.zeros(span, dtype=torch.int8, device=sums.device)
    entries, outside = 0, torch.zeros(1, dtype=torch.int64, device=sums.device)
    with on_device_of(sums):
        for indices, values in chain([first], rest):
            entries += indices.numel()
            if blocks := _blocks(indices):
                tallies = torch.empty(blocks, dtype=torch.int32, device=sums.device)
                cuda_kernels.add_to_region[(blocks,)](
                    sums, touched, indices, values, tallies, indices.numel(), base, span, BLOCK=BLOCK
                )
                outside += tallies.sum()
        room = min(entries, span)
        out = torch.empty(room, dtype=first[0].dtype, device=sums.device), torch.empty(room, device=sums.device)
        if span == 0 and entries:
            raise ValueError(OUTSIDE)
        if room == 0:
            return out
        ends = _tally(touched, _TOUCHED, _TOUCHED)
        _compact(touched, sums, out, ends, _TOUCHED, base=base)
        count, misplaced = torch.cat([ends[0, -1:], outside]).tolist()
    if misplaced:
        raise ValueError(OUTSIDE)
    return out[0][:count], out[1][:count]


accumulate_select_pieces = partial(select_in_turn, accumulate_select)
scatter_add_pieces_ = partial(put_in_turn, scatter_add_)
assign_pieces_ = partial(put_in_turn, assign_)
