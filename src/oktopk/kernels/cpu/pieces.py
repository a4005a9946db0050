"""Vectors in pieces on CPUs: one call into compiled code for all pieces, by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from ..pieces import select_in_turn
from ..types import OUTSIDE, Picked, edges_of, index_dtype, threshold_pair
from .selection import accumulate_select, select_one
from .sparse import add_one, assign_one
from .vector import compiled, pointer


def _addresses(pieces: Sequence[Tensor], edges: Sequence[int]) -> Any:
    """The addresses of the pieces. Compiled code trusts them, so this checks dtype, device and size."""
    for piece, (start, stop) in zip(pieces, pairwise(edges), strict=True):
        if piece.dtype != torch.float32 or not piece.is_cpu or not piece.is_contiguous():
            raise ValueError(
                f"kernels need contiguous float32 in host memory, got {piece.dtype} on {piece.device}"
            )
        if piece.numel() != stop - start:
            raise ValueError(f"piece has {piece.numel()} entries, expected {stop - start}")
    return np.array([piece.data_ptr() for piece in pieces], np.int64)


@compiled
def _select(residuals, grads, edges, threshold, higher, indices, values):
    count, above, finite = 0, 0, True
    for piece in range(residuals.size):
        size = edges[piece + 1] - edges[piece]
        x, grad = carray(pointer(residuals[piece], values), size), carray(pointer(grads[piece], values), size)
        stored = min(count, indices.size)
        found = select_one(
            x, grad, grad, threshold, higher, edges[piece], indices[stored:], values[stored:]
        )  # fmt: skip
        count += found[0]
        above += found[1]
        finite &= found[2]
    return count, above, finite


def accumulate_select_pieces(
    residuals: Sequence[Tensor], grads: Sequence[Tensor], threshold: float, capacity: int
) -> Picked:
    if torch.get_num_threads() > 1:  # then each piece is shared among the threads
        return select_in_turn(accumulate_select, residuals, grads, threshold, capacity)
    edges = edges_of(residuals)
    (low, higher), room = threshold_pair(threshold), min(capacity, edges[-1])
    indices, values = torch.empty(room, dtype=index_dtype(edges[-1])), torch.empty(room)
    count, above, finite = _select(
        _addresses(residuals, edges),
        _addresses(grads, edges),
        np.array(edges),
        low,
        higher,
        indices.numpy(),
        values.numpy(),
    )
    return Picked(indices[:count], values[:count], count, above, finite)


@compiled
def _put(pieces, edges, indices, values, factor, clear):
    """Add the values of each piece or, with clear, assign them and zero the rest.

    The search finds a place for every index only if they are in order; the kernel of a piece checks those it gets.
    """
    if np.searchsorted(indices, edges[-1]) < indices.size:
        raise ValueError(OUTSIDE)
    found, start = 0, 0
    for piece in range(pieces.size):
        out = carray(pointer(pieces[piece], values), edges[piece + 1] - edges[piece])
        stop = np.searchsorted(indices, edges[piece + 1])
        local, part = indices[start:stop], values[start:stop]
        if clear:
            found += assign_one(out, pieces[piece], local, part, edges[piece], factor)
        else:
            found += add_one(out, local, part, edges[piece], factor)
        start = stop
    return found


def _put_all(
    pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0, counted: bool = True, *,
    clear: bool,
) -> int:  # fmt: skip
    edges = edges_of(pieces)
    if values.dtype != torch.float32 or values.numel() != indices.numel():
        raise ValueError(f"{values.numel()} values of {values.dtype} for {indices.numel()} indices: need float32")
    if indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < edges[-1]:
        raise ValueError(f"indices from {int(indices[0])} to {int(indices[-1])} for {edges[-1]} entries")
    starts, by = np.array(edges), np.float32(factor)
    return int(_put(_addresses(pieces, edges), starts, indices.numpy(), values.numpy(), by, clear))


scatter_add_pieces_ = partial(_put_all, clear=False)
assign_pieces_ = partial(_put_all, clear=True)
