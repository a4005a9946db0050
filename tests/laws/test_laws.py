"""The laws of `docs/algorithms.md`, for every algorithm in the registry, at every rank count, on edge cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oktopk
from tests.support.laws import WORLDS, assert_conservation, assert_laws, bits, heavy_tailed, run

SIZE = 1009
SHAPES = {  # size and density
    "one entry": (1, 0.5),
    "fewer entries than ranks": (3, 0.5),
    "k = 1": (50, 0.001),
    "k times P above n": (40, 0.5),
    "a prime": (SIZE, 0.03),
    "almost everything": (257, 0.97),
}


def zeros(rank: int, step: int) -> Tensor:
    return torch.zeros(SIZE)


def zeros_on_some(rank: int, step: int) -> Tensor:
    return heavy_tailed(SIZE)(rank, step) * (rank % 3 == 1)


def only_rank_0_in_one_place(rank: int, step: int) -> Tensor:
    x = torch.zeros(SIZE)
    x[700] = 1.0 if rank == 0 else 0.0
    return x


def cancelling(rank: int, step: int) -> Tensor:
    """Rank 2j+1 has the opposite of rank 2j: all sums are exactly zero at even P."""
    return heavy_tailed(SIZE)(rank // 2 * 2, step) * (1.0 if rank % 2 == 0 else -1.0)


def ties(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 17 * step)
    return torch.randint(0, 2, (SIZE,), generator=generator) * 2.0 - 1.0


def all_the_same(rank: int, step: int) -> Tensor:
    return torch.full((SIZE,), 0.25)


def all_in_one_region(rank: int, step: int) -> Tensor:
    x = torch.zeros(SIZE)
    x[-40:] = heavy_tailed(40)(rank, step)
    return x


def tiny_and_huge(rank: int, step: int) -> Tensor:
    return heavy_tailed(SIZE)(rank, step) * (1e-30 if step % 2 else 1e30)


def below_normal(rank: int, step: int) -> Tensor:
    return torch.full((SIZE,), 1e-41)


EDGE_CASES = {
    function.__name__: function
    for function in (
        zeros, zeros_on_some, only_rank_0_in_one_place, cancelling, ties, all_the_same, all_in_one_region,
        tiny_and_huge, below_normal,
    )
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_agreement_and_conservation_at_every_size(algorithm: str, world: int) -> None:
    """Laws 1 and 2, and 5: no size, density or rank count is special."""
    for size, density in SHAPES.values():
        assert_laws(run(world, heavy_tailed(size), 4, algorithm, density))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", EDGE_CASES)
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_agreement_and_conservation_on_edge_cases(algorithm: str, case: str, world: int) -> None:
    """Law 5: empty selections, exact cancellation, ties, everything in one place."""
    assert_laws(run(world, EDGE_CASES[case], 3, algorithm, 0.02))


@pytest.mark.parametrize("values", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_lossy_values_lose_nothing(algorithm: str, world: int, values: str) -> None:
    """Law 2 with each lossy wire: the sender keeps its rounding error."""
    for gradient in (heavy_tailed(SIZE), all_in_one_region, tiny_and_huge):
        assert_laws(run(world, gradient, 4, algorithm, 0.05, values=values))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_density_one_is_dense(algorithm: str, world: int) -> None:
    """Law 3: with density 1 the threshold is 0, the result is the mean, and nothing stays behind."""
    gradient = heavy_tailed(SIZE)
    for t, step in enumerate(run(world, gradient, 3, algorithm, 1.0)):
        mean = sum(gradient(r, t).double() for r in range(world)) / world
        scale = sum(gradient(r, t).double().abs() for r in range(world)) / world
        assert ((step[0].mean.double() - mean).abs() <= 1e-6 * scale).all()
        for outcome in step:
            assert outcome.info.threshold == 0.0
            assert not outcome.after.any()


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
@pytest.mark.parametrize("world", [1, 3])
def test_an_empty_tensor_is_legal(algorithm: str, world: int) -> None:
    (step,) = run(world, lambda rank, step: torch.zeros(0), 1, algorithm, 0.1)
    assert all(outcome.mean.numel() == 0 for outcome in step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_any_floating_type_and_shape(algorithm: str, dtype: torch.dtype) -> None:
    """Accumulated in float32, returned in the type and shape that came in, also from a strided view."""

    def gradient(rank: int, step: int) -> Tensor:
        return heavy_tailed(600)(rank, step).to(dtype).view(20, 30).t()

    steps = run(3, gradient, 4, algorithm, 0.1)
    for step in steps:
        assert_conservation(step)
        for outcome in step:
            assert outcome.mean.dtype == dtype
            assert outcome.mean.shape == (30, 20)
            assert torch.equal(outcome.mean, step[0].mean)


def test_a_half_precision_mean_is_never_infinite() -> None:
    """What float16 cannot hold stays in a residual."""
    residual = torch.full((10,), 6e4)
    mean, info = oktopk.sparse_allreduce(torch.full((10,), 6e4).half(), 0.5, residual=residual)
    assert not info.skipped
    assert mean.isfinite().all()
    torch.testing.assert_close(mean.float() + residual, torch.full((10,), torch.tensor(6e4).half().item() + 6e4))


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_the_same_inputs_give_the_same_bits(algorithm: str) -> None:
    first, second = (run(5, heavy_tailed(SIZE), 6, algorithm, 0.03) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(bits(x.mean), bits(y.mean))
            assert torch.equal(bits(x.after), bits(y.after))


def test_the_input_is_not_touched() -> None:
    def rank(comm: oktopk.Communicator) -> None:
        tensor = heavy_tailed(SIZE)(comm.rank, 0)
        copy = tensor.clone()
        oktopk.sparse_allreduce(tensor, 0.1, comm=comm)
        assert torch.equal(tensor, copy)

    oktopk.run_threads(3, rank)
