"""Memory in pieces: one vector that lies in several tensors, end to end. Here piece by piece, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .types import Picked, index_dtype

Apply = Callable[[Tensor, Tensor, Tensor], int]
"""A kernel that puts (indices, values) into a tensor."""


def edges_of(pieces: Sequence[Tensor]) -> list[int]:
    """Where each piece starts, and where the last one ends."""
    return [0, *accumulate(piece.numel() for piece in pieces)]


def join_picked(found: Sequence[Picked], edges: Sequence[int], capacity: int) -> Picked:
    """What was found in the pieces, as found in the whole: who had more than its capacity has filled all of it."""
    dtype = index_dtype(edges[-1])
    indices = [one.indices.to(dtype) + edge for one, edge in zip(found, edges, strict=False)]
    return Picked(
        torch.cat(indices)[:capacity],
        torch.cat([one.values for one in found])[:capacity],
        sum(one.count for one in found),
        sum(one.above for one in found),
        all(one.finite for one in found),
    )


def select_in_turn(
    kernel: Callable[..., Picked],
    residuals: Sequence[Tensor],
    grads: Sequence[Tensor],
    threshold: float,
    capacity: int,
) -> Picked:
    """accumulate_select over all pieces, which leaves in grads what the residuals were."""
    pairs = zip(residuals, grads, strict=True)
    found = [kernel(residual, grad, threshold, capacity, keep_old=True) for residual, grad in pairs]
    return join_picked(found, edges_of(residuals), capacity)


def put_in_turn(
    kernel: Apply, pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0
) -> int:
    """scatter_add_ or assign_ of factor * values over all pieces; returns the sum of what it returns."""
    scaled = values if factor == 1.0 else factor * values
    return sum(kernel(piece, local, part) for piece, local, part in cut(pieces, indices, scaled))


def cut(pieces: Sequence[Tensor], indices: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(piece, the indices that fall into it, counted from its start, and their values)."""
    edges = edges_of(pieces)
    at = torch.tensor(edges, dtype=indices.dtype, device=indices.device)
    places = pairwise(torch.searchsorted(indices, at).tolist())
    for piece, edge, (start, stop) in zip(pieces, edges, places, strict=False):
        yield piece, (indices[start:stop] - edge).to(index_dtype(piece.numel())), values[start:stop]
