"""Memory in pieces on CPUs: one call into compiled code for all of them, by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from ..pieces import edges_of, select_in_turn
from ..types import Picked, float32, index_dtype
from .selection import accumulate_select, compiled, higher, select_one
from .sparse import add_one, assign_one
from .vector import pointer


def _addresses(pieces: Sequence[Tensor], edges: Sequence[int]) -> Any:
    """Compiled code believes them, so that they are looked at here."""
    for piece, (start, stop) in zip(pieces, pairwise(edges), strict=True):
        if piece.dtype != torch.float32 or not piece.is_cpu or not piece.is_contiguous():
            raise ValueError(
                f"kernels need contiguous float32 in host memory, got {piece.dtype} on {piece.device}"
            )
        if piece.numel() != stop - start:
            raise ValueError(f"a piece of {piece.numel()} entries where {stop - start} are expected")
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
    if torch.get_num_threads() > 1:  # which share each of the pieces
        return select_in_turn(accumulate_select, residuals, grads, threshold, capacity)
    edges = edges_of(residuals)
    low, room = float32(threshold), min(capacity, edges[-1])
    indices, values = torch.empty(room, dtype=index_dtype(edges[-1])), torch.empty(room)
    count, above, finite = _select(
        _addresses(residuals, edges),
        _addresses(grads, edges),
        np.array(edges),
        low,
        higher(low),
        indices.numpy(),
        values.numpy(),
    )
    return Picked(indices[:count], values[:count], count, above, finite)


@compiled
def _put(pieces, edges, indices, values, factor, clear):
    """Add what falls into each piece, or clear it and then assign."""
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


def _put_all(pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float, clear: bool) -> int:
    edges = edges_of(pieces)
    if values.dtype != torch.float32 or values.numel() != indices.numel():
        raise ValueError(f"{values.numel()} values of {values.dtype} for {indices.numel()} indices: need float32")
    if indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < edges[-1]:
        raise ValueError(f"indices from {int(indices[0])} to {int(indices[-1])} for {edges[-1]} entries")
    starts, by = np.array(edges), np.float32(factor)
    return int(_put(_addresses(pieces, edges), starts, indices.numpy(), values.numpy(), by, clear))


def scatter_add_pieces_(pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0) -> int:
    return _put_all(pieces, indices, values, factor, False)


def assign_pieces_(pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = 1.0) -> int:
    return _put_all(pieces, indices, values, factor, True)
