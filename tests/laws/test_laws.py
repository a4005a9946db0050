"""The laws of `docs/algorithms.md`, for every algorithm in the registry, at every rank count, on edge cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.testing import CASES, WORLDS, check_case
from oktopk.testing.gradients import SIZE, heavy_tailed
from oktopk.testing.laws import assert_conservation, run


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_laws(algorithm: str, case: str, world: int) -> None:
    """Laws 1, 2, 3 and 5, as authors of plug-ins run them on theirs: no size, density or rank count is special."""
    check_case(algorithm, case, world)


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
@pytest.mark.parametrize("world", [1, 4])
def test_the_threshold_of_density_one_is_zero(algorithm: str, world: int) -> None:
    for step in run(world, heavy_tailed(SIZE), 3, algorithm, 1.0):
        assert {outcome.info.threshold for outcome in step} == {0.0}


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


def test_the_input_is_not_touched() -> None:
    def rank(comm: oktopk.Communicator) -> None:
        tensor = heavy_tailed(SIZE)(comm.rank, 0)
        copy = tensor.clone()
        oktopk.sparse_allreduce(tensor, 0.1, comm=comm)
        assert torch.equal(tensor, copy)

    oktopk.run_threads(3, rank)
