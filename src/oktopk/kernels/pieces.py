"""Vectors in pieces: one vector stored in several tensors. Kernels that go piece by piece, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .types import OUTSIDE, Picked, edges_of, index_dtype

Array = np.ndarray[Any, np.dtype[Any]]
Apply = Callable[[Tensor, Tensor, Tensor], int]
"""A kernel that writes (indices, values) into a tensor."""


def join_picked(found: Sequence[Picked], edges: Sequence[int], capacity: int) -> Picked:
    """Concatenate the selections from the pieces, as if selected from the whole vector."""
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
    """Run accumulate_select on every piece. The old residuals end up in grads."""
    pairs = zip(residuals, grads, strict=True)
    found = [kernel(residual, grad, threshold, capacity, keep_old=True) for residual, grad in pairs]
    return join_picked(found, edges_of(residuals), capacity)


def put_in_turn(
    kernel: Apply, pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0,
    counted: bool = True,
) -> int:  # fmt: skip
    """Run scatter_add_ or assign_ with factor * values on every piece. Returns the sum of the results."""
    scaled = values if factor == 1.0 else factor * values
    return sum(kernel(piece, local, part) for piece, local, part in split_by_piece(pieces, indices, scaled))


def split_by_piece(
    pieces: Sequence[Tensor], indices: Tensor, values: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each piece with its indices, counted from its start, and their values.

    The search finds a place for every index only if they are in order; the kernel of a piece checks those it gets.
    """
    edges = edges_of(pieces)
    at = torch.tensor(edges, dtype=indices.dtype, device=indices.device)
    places = torch.searchsorted(indices, at).tolist()
    if (places[0], places[-1]) != (0, indices.numel()):
        raise ValueError(OUTSIDE)
    for piece, edge, (start, stop) in zip(pieces, edges, pairwise(places), strict=False):
        yield piece, (indices[start:stop] - edge).to(index_dtype(piece.numel())), values[start:stop]


def check_inside(indices: Array, edges: Sequence[int]) -> list[int]:
    """Where the indices of each piece start and the last ones end; they must rise and lie inside."""
    if indices.size and (indices[0] < 0 or indices[-1] >= edges[-1] or not (indices[1:] > indices[:-1]).all()):
        raise ValueError(OUTSIDE)
    return list(np.searchsorted(indices, edges).tolist())
