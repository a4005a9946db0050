"""The laws once more, on real processes: three ranks of gloo and three of MPI, against three threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk import ALGORITHMS, Communicator, run_threads, sparse_allreduce
from tests.support import worlds

pytestmark = pytest.mark.processes
P, N, STEPS, DENSITY = 3, 1501, 5, 0.04
VALUES = ("fp32", "fp16")
SPARSE = [name for name in ALGORITHMS if name != "dense"]

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another size": ({"tensor": torch.ones(N + 1)}, "disagree on tensor size"),
    "density 0": ({"density": 0}, r"density must be in \(0, 1\], got 0"),
    "unknown algorithm": ({"algorithm": "nope"}, "unknown algorithm 'nope'"),
    "integers": ({"tensor": torch.arange(N)}, "unsupported tensor dtype torch.int64"),
    "sparse layout": ({"tensor": torch.ones(N).to_sparse()}, "tensor must be dense"),
}


@dataclass(frozen=True)
class Step:
    result: Tensor
    residual: Tensor


@dataclass(frozen=True)
class Report:
    """What one rank has seen."""

    steps: dict[tuple[str, str], list[Step]]
    full: dict[str, Tensor]
    """The results at density 1."""
    refusals: dict[str, Exception | None]


def gradient(rank: int, step: int) -> Tensor:
    """A few large entries among many small ones, partly the same on all ranks."""
    own, common = (torch.Generator().manual_seed(1000 * step + r) for r in (rank, 999))
    scale = torch.randn(N, generator=common).mul(1.5).exp()
    return scale * (torch.randn(N, generator=common) + torch.randn(N, generator=own))


def follow(comm: Communicator, algorithm: str, values: str) -> list[Step]:
    residual, state, steps = torch.zeros(N), None, []
    for step in range(STEPS):
        result, info = sparse_allreduce(
            gradient(comm.rank, step), DENSITY, algorithm, residual, comm, values=values, state=state, step=step
        )
        state = info.state
        steps.append(Step(result, residual.clone()))
    return steps


def refused(comm: Communicator, mistake: dict[str, Any]) -> Exception | None:
    """The error that a mistake on rank 1 leads to here; after it the ranks still understand each other."""
    good = {"tensor": gradient(comm.rank, 0), "density": DENSITY, "algorithm": "oktopk"}
    error = None
    try:
        sparse_allreduce(**(good | (mistake if comm.rank == 1 else {})), comm=comm)
    except Exception as caught:
        error = caught
    sparse_allreduce(**good, comm=comm)
    return error


def job(connect: Callable[..., Communicator]) -> Report:
    comm = connect(timeout=30.0)
    return Report(
        {(name, values): follow(comm, name, values) for name in ALGORITHMS for values in VALUES},
        {name: sparse_allreduce(gradient(comm.rank, 0), 1.0, name, comm=comm)[0] for name in ALGORITHMS},
        {name: refused(comm, mistake) for name, (mistake, _) in MISTAKES.items()},
    )


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def reports(request: pytest.FixtureRequest) -> list[Report]:
    """Of every rank of real processes; all laws are checked on one run of them."""
    return worlds.run(request.param, P, job)


@pytest.fixture(scope="module")
def simulated() -> list[Report]:
    return run_threads(P, lambda comm: job(lambda timeout: comm))


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_format = pytest.mark.parametrize("values", VALUES)


@every_algorithm
@every_format
def test_all_ranks_have_the_same_bits(reports: list[Report], algorithm: str, values: str) -> None:
    first, *others = [report.steps[algorithm, values] for report in reports]
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine.result.view(torch.int32), theirs.result.view(torch.int32))


@every_algorithm
@every_format
def test_what_goes_out_plus_what_stays_is_what_came_in(reports: list[Report], algorithm: str, values: str) -> None:
    ranks = [report.steps[algorithm, values] for report in reports]
    before = torch.zeros(N, dtype=torch.float64)
    for step in range(STEPS):
        gradients = torch.stack([gradient(rank, step) for rank in range(P)]).double()
        residuals = torch.stack([steps[step].residual for steps in ranks]).double()
        came_in = gradients.sum(0) + before
        accounted = residuals.sum(0) + P * ranks[0][step].result.double()
        size = gradients.abs().sum(0) + before.abs() + residuals.abs().sum(0)
        assert bool(((accounted - came_in).abs() <= 2.0**-20 * size + 1e-30).all()), f"step {step}"
        before = residuals.sum(0)


@every_algorithm
def test_density_one_is_dense(reports: list[Report], algorithm: str) -> None:
    mean = sum(gradient(rank, 0).double() for rank in range(P)) / P
    for report in reports:
        assert torch.allclose(report.full[algorithm].double(), mean, rtol=1e-5, atol=1e-5)
        assert torch.allclose(report.full[algorithm], report.full["dense"], rtol=1e-5, atol=1e-5)


@every_format
@pytest.mark.parametrize("algorithm", SPARSE)
def test_threads_have_the_same_bits(
    reports: list[Report], simulated: list[Report], algorithm: str, values: str
) -> None:
    for real, model in zip(reports, simulated, strict=True):
        for one, other in zip(real.steps[algorithm, values], model.steps[algorithm, values], strict=True):
            assert torch.equal(one.result.view(torch.int32), other.result.view(torch.int32))
            assert torch.equal(one.residual.view(torch.int32), other.residual.view(torch.int32))


@every_format
def test_threads_have_the_same_dense_sum_but_for_rounding(
    reports: list[Report], simulated: list[Report], values: str
) -> None:
    for real, model in zip(reports, simulated, strict=True):
        for one, other in zip(real.steps["dense", values], model.steps["dense", values], strict=True):
            assert torch.allclose(one.result, other.result, rtol=1e-5, atol=1e-5)
            assert torch.equal(one.residual, torch.zeros(N))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_rank_is_a_value_error_on_all(reports: list[Report], mistake: str) -> None:
    for report in reports:
        error = report.refusals[mistake]
        assert error is not None
        with pytest.raises(ValueError, match=MISTAKES[mistake][1]):
            raise error
