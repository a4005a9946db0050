"""Memory in pieces: every backend does to several tensors what it does to one of all their entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from oktopk.kernels import Backend, Picked, cpu
from tests.support.kernels.backends import every_kernels

LAYOUTS = [[97], [0, 40, 33], [1, 0, 100, 0], [64, 5, 31, 300], [9000, 8, 4096]]
DTYPES = [torch.int32, torch.int64]


def heavy(size: int, seed: int) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).pow(3)
    return (8 * x).round() / 8  # with zeros and ties


def pieces_of(x: Tensor, sizes: list[int], at: int) -> list[Tensor]:
    """Copies at odd addresses, with something beside them that must not be touched."""
    return [torch.cat([torch.full((at,), 7.0), part, torch.full((5,), 7.0)])[at:-5] for part in x.split(sizes)]


def assert_neighbours_are_untouched(pieces: list[Tensor], at: int) -> None:
    for piece in pieces:
        memory = torch.as_strided(piece, (piece.numel() + at + 5,), (1,), 0)
        assert (memory[:at] == 7).all()
        assert (memory[at + piece.numel() :] == 7).all()


def told(picked: Picked) -> tuple[object, ...]:
    return picked.indices.tolist(), picked.values.tolist(), picked.count, picked.above, picked.finite


ALL = list(itertools.product(LAYOUTS[:-1], [0, 3, 41, 1000], [1, 2], [0, 3, 16]))
SOME = list(zip([LAYOUTS[-1]] * 4, [0, 3, 41, 1000], [1, 2, 1, 2], [0, 3, 16, 3], strict=True))
"""Of the largest layout, for which Triton's interpreter takes seconds."""


@every_kernels
@pytest.mark.parametrize(("sizes", "capacity", "threads", "at"), ALL + SOME, ids=str)
def test_one_selection_over_all(kernels: Backend, sizes: list[int], capacity: int, threads: int, at: int) -> None:
    grad, residual = heavy(sum(sizes), 1), heavy(sum(sizes), 2)
    grads, residuals = pieces_of(grad, sizes, at), pieces_of(residual, sizes, 1)
    torch.set_num_threads(threads)
    try:
        found = kernels.accumulate_select_pieces(residuals, grads, 0.5, capacity)
    finally:
        torch.set_num_threads(1)
    assert told(found) == told(kernels.accumulate_select(residual, grad, 0.5, capacity, True))
    assert torch.equal(torch.cat(residuals), residual)
    assert torch.equal(torch.cat(grads), grad)
    assert_neighbours_are_untouched(grads, at)
    assert_neighbours_are_untouched(residuals, 1)


@every_kernels
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_seen_in_any_piece(kernels: Backend, sizes: list[int], bad: float) -> None:
    for place in (0, sum(sizes) - 1):
        grad = heavy(sum(sizes), 1)
        grad[place] = bad
        zeros = [torch.zeros(size) for size in sizes]
        assert not kernels.accumulate_select_pieces(zeros, list(grad.split(sizes)), 100.0, 5).finite


@every_kernels
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize(("at", "factor"), [(0, 1.0), (1, -1.0), (31, 0.25)])
def test_entries_go_to_their_pieces(
    kernels: Backend, sizes: list[int], dtype: torch.dtype, step: int, at: int, factor: float
) -> None:
    whole = heavy(sum(sizes), 3)
    indices = torch.arange(0, sum(sizes), step, dtype=dtype)
    values = heavy(indices.numel(), 4)
    for one, several in ("scatter_add_", "scatter_add_pieces_"), ("assign_", "assign_pieces_"):
        expected, pieces = whole.clone(), pieces_of(whole, sizes, at)
        count = getattr(kernels, one)(expected, indices, factor * values)
        assert getattr(kernels, several)(pieces, indices, values, factor) == count
        assert torch.equal(torch.cat(pieces), expected)
        assert_neighbours_are_untouched(pieces, at)


MISPLACED = {"in between": [0, 2, 100, 7], "below": [-1, 3], "behind": [3, 8], "behind the first": [1, 9, 2, 3]}


@every_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[8], [3, 0, 5]], ids=str)
@pytest.mark.parametrize("where", MISPLACED)
def test_no_entry_is_dropped_silently(kernels: Backend, dtype: torch.dtype, sizes: list[int], where: str) -> None:
    indices = torch.tensor(MISPLACED[where], dtype=dtype)
    values = torch.ones(indices.numel())
    for name in ("scatter_add_pieces_", "assign_pieces_"):
        with pytest.raises(ValueError, match="indices"):
            getattr(kernels, name)([torch.zeros(size) for size in sizes], indices, values)


@every_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", MISPLACED)
def test_no_entry_is_written_outside(kernels: Backend, dtype: torch.dtype, where: str) -> None:
    indices = torch.tensor(MISPLACED[where], dtype=dtype)
    values, memory = torch.ones(indices.numel()), torch.zeros(24)
    for call in (
        lambda: kernels.scatter_add_(memory[8:16], indices, values),
        lambda: kernels.assign_(memory[8:16], indices, values),
        lambda: kernels.union_sum([(indices + 40, values)], 40, 8),
    ):
        with pytest.raises(ValueError, match="out of range"):
            call()
    assert not memory[:8].any()
    assert not memory[16:].any()


@pytest.mark.parametrize("wrong", [torch.ones(2, dtype=torch.float64), torch.ones(3)], ids=["type", "number"])
def test_compiled_code_gets_no_values_that_it_cannot_read(wrong: Tensor) -> None:
    pieces = [torch.zeros(8), torch.zeros(4)]
    for kernel in (cpu.assign_pieces_, cpu.scatter_add_pieces_):
        with pytest.raises(ValueError, match="for 2 indices: need float32"):
            kernel(pieces, torch.tensor([0, 11], dtype=torch.int32), wrong)
    assert not torch.cat(pieces).any()


@pytest.mark.parametrize("wrong", ["type", "strides", "size", "index below", "index above"])
def test_compiled_code_gets_no_address_that_it_cannot_use(wrong: str) -> None:
    residuals, grads = [torch.zeros(8), torch.zeros(4)], [torch.ones(8), torch.ones(4)]
    indices = torch.tensor([0, 11], dtype=torch.int32)
    if wrong == "type":
        grads[1] = grads[1].double()
    if wrong == "strides":
        grads[1] = torch.ones(8)[::2]
    if wrong == "size":
        grads[1] = torch.ones(3)
    if wrong.startswith("index"):
        indices[0 if "below" in wrong else 1] = -1 if "below" in wrong else 12
        with pytest.raises(ValueError, match="for 12 entries"):
            cpu.assign_pieces_(residuals, indices, torch.ones(2))
    else:
        with pytest.raises(ValueError, match=r"contiguous float32|piece has 3 entries, expected 4"):
            cpu.accumulate_select_pieces(residuals, grads, 1.0, 3)
    assert not torch.cat(residuals).any()
