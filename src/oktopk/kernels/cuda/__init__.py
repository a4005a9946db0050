"""The kernels for GPUs, compiled by Triton; equal to `reference` to the bit.

Selection takes three launches: count per block, cumulative sum, write each block's entries. The host reads all
scalar results of a kernel in one transfer, the only point where it waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import reference
from ..pieces import check_inside, join_picked, put_in_turn
from ..types import BIN_BITS, OUTSIDE, Picked, edges_of, float32, index_dtype, threshold_pair
from . import kernels as cuda_kernels
from . import transfer

BLOCK = 1024
"""Entries per program of a launch."""

_TOUCHED = 0.5
"""Threshold between touched entries, marked 1, and others, marked 0."""

first_equal = reference.first_equal
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


class _Selecting(NamedTuple):
    """A selection that is under way on the device."""

    indices: Tensor
    values: Tensor
    totals: Tensor
    """Entries selected, above SLOPE_STEP times the threshold, and non-finite."""

    def picked(self, totals: list[int]) -> Picked:
        count, above, bad = totals
        return Picked(self.indices[:count], self.values[:count], count, above, bad == 0)


def _begin_select(
    x: Tensor, threshold: float, capacity: int, grad: Tensor | None = None, keep_old: bool = False
) -> _Selecting:
    low, higher = map(float, threshold_pair(threshold))
    room = min(capacity, x.numel())
    indices = torch.empty(room, dtype=index_dtype(x.numel()), device=x.device)
    values = torch.empty(room, device=x.device)
    if x.numel() == 0:
        return _Selecting(indices, values, torch.zeros(3, dtype=torch.int64, device=x.device))
    with on_device_of(x):
        ends = _tally(x, low, higher, grad, keep_old)
        if room:
            _compact(x, x, (indices, values), ends, low)
    return _Selecting(indices, values, ends[:, -1])


def select(
    x: Tensor, threshold: float, capacity: int, grad: Tensor | None = None, keep_old: bool = False
) -> Picked:
    """As the reference; `grad`, if given, is added to x in the same pass."""
    begun = _begin_select(x, threshold, capacity, grad, keep_old)
    return begun.picked(begun.totals.tolist())


def accumulate_select_pieces(
    residuals: Sequence[Tensor], grads: Sequence[Tensor], threshold: float, capacity: int
) -> Picked:
    """As the reference, with one transfer for all pieces."""
    pairs = zip(residuals, grads, strict=True)
    begun = [_begin_select(residual, threshold, capacity, grad, keep_old=True) for residual, grad in pairs]
    totals = torch.stack([one.totals for one in begun]).tolist()
    found = [one.picked(numbers) for one, numbers in zip(begun, totals, strict=True)]
    return join_picked(found, edges_of(residuals), capacity)


def kth_magnitude(x: Tensor, k: int) -> float:
    """As the reference. kthvalue uses a single block of the GPU, topk all of it."""
    return float(x.abs().topk(k).values[-1])


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
    indices, values = indices.to(out.device), values.to(out.device)
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


# --- vectors in host memory ----------------------------------------------------------------------------------


def to_host(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A sparse vector in host memory, by one copy."""
    words = torch.cat([indices.view(torch.int32), values.view(torch.int32)])
    here = transfer.copy_to_host(words)
    places, numbers = torch.split(here, [words.numel() - values.numel(), values.numel()])
    return places.view(indices.dtype), numbers.view(torch.float32)


def scatter_add_pieces_(
    pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0, counted: bool = True
) -> int:
    """As the reference. A vector in host memory is checked there, and the host does not wait unless `counted`."""
    if counted or not transfer.on_host(indices):
        device = pieces[0].device
        return put_in_turn(scatter_add_, pieces, indices.to(device), values.to(device), factor)
    for piece, local, part in _move(pieces, indices, values, factor):
        blocks = _blocks(local)
        with on_device_of(piece):
            tallies = torch.empty(2, blocks, dtype=torch.int32, device=piece.device)
            cuda_kernels.scatter_add[(blocks,)](
                piece, local, part, tallies, local.numel(), blocks, piece.numel(), BLOCK=BLOCK
            )
    return 0


def assign_pieces_(pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0) -> int:
    """As the reference. A vector in host memory is checked and counted there: the host does not wait."""
    if not transfer.on_host(indices):
        return put_in_turn(assign_, pieces, indices, values, factor)
    moved = list(_move(pieces, indices, values, factor))  # an error must come before anything is overwritten
    for piece in pieces:
        piece.zero_()
    for piece, local, part in moved:
        piece.index_copy_(0, local.long(), part)
    return int(np.count_nonzero((values if factor == 1.0 else factor * values).numpy()))


def _move(
    pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each piece that gets something, with its part of a vector that is in host memory: one copy for all of it."""
    edges = edges_of(pieces)
    cuts = check_inside(indices.numpy(), edges)
    scaled = values if factor == 1.0 else factor * values
    there = transfer.copy_to_device(
        torch.cat([indices.view(torch.int32), scaled.view(torch.int32)]), pieces[0].device
    )
    places, numbers = torch.split(there, [there.numel() - values.numel(), values.numel()])
    places, numbers = places.view(indices.dtype), numbers.view(torch.float32)
    for piece, edge, (start, stop) in zip(pieces, edges, pairwise(cuts), strict=False):
        if start < stop:
            yield piece, places[start:stop] - edge, numbers[start:stop]
