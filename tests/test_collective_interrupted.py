"""Ctrl-C inside the bare collective, caught: an error on all ranks afterwards, or the right result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from tests.support import worlds
from tests.support.interrupting import COLLECTIVE, InterruptAt

STEPS, WHEN, RUNS = 3, 1, 40


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(400, generator=torch.Generator().manual_seed(10 * step + rank))


def train(comm: oktopk.Communicator | None, rank: int, algorithm: str, watch: InterruptAt) -> Tensor:
    """The sum of all means, of a loop that goes on with the next step after Ctrl-C."""
    residual, state, applied = torch.zeros(400), None, torch.zeros(400)
    for step in range(STEPS):
        try:
            with watch if (rank, step) == (0, WHEN) else InterruptAt():
                mean, info = oktopk.sparse_allreduce(
                    gradient(rank, step), 0.05, algorithm, residual, comm, state=state, step=step
                )
            applied, state = applied + mean, info.state
        except KeyboardInterrupt:
            continue
    return applied


@pytest.mark.parametrize("algorithm", ["topka", "oktopk", "dense"])
def test_a_caught_interrupt_is_an_error_or_harmless(algorithm: str) -> None:
    def run(watch: InterruptAt) -> list[Tensor]:
        return oktopk.run_threads(2, lambda comm: train(comm, comm.rank, algorithm, watch), timeout=2.0)

    count = InterruptAt(watched=COLLECTIVE)
    undisturbed = run(count)
    assert count.lines > 100
    errors = []
    for at in range(1, count.lines + 1, max(1, count.lines // RUNS)):
        try:
            outcome = run(InterruptAt(at, COLLECTIVE))
        except (oktopk.OkTopkError, ValueError) as error:
            errors.append(str(error))
            continue
        assert all(map(torch.equal, outcome, undisturbed)), at
    assert len(errors) >= RUNS // 2
    assert any("interrupted mid-step by KeyboardInterrupt" in text for text in errors)


def test_ranks_raise_after_an_interrupt_and_not_after_a_wrong_argument() -> None:
    def rank(comm: oktopk.Communicator) -> list[str]:
        said = []
        count = InterruptAt(None, COLLECTIVE)
        with count:
            oktopk.sparse_allreduce(torch.ones(40), 0.1, comm=comm)
        for interrupted in (False, True, False):
            watch = InterruptAt(count.lines // 2 if interrupted and comm.rank == 0 else None, COLLECTIVE)
            with pytest.raises(BaseException) as caught, watch:  # noqa: PT011
                oktopk.sparse_allreduce(torch.ones(40), 0.1 if interrupted else 2.0, comm=comm)
            said.append(f"{caught.type.__name__}: {caught.value}")
        return said

    texts: list[list[str]] = []
    with pytest.raises(oktopk.CommError, match="interrupted mid-step"):  # of the first rank that failed
        oktopk.run_threads(2, lambda comm: texts.append(rank(comm)), timeout=20.0)
    for first, second, third in texts:
        assert first.startswith("ValueError: density must be")
        assert second.startswith(("KeyboardInterrupt", "Aborted"))
        assert "did not come to its end on this rank" in third


def interrupt_default(connect: Callable[..., Any]) -> list[str]:
    """Every call makes a communicator of the default group; the interrupt is remembered all the same."""
    rank, said = dist.get_rank(), []
    oktopk.sparse_allreduce(torch.ones(40), 0.1, "topka")  # the first call does what later ones need not do
    count = InterruptAt(None, COLLECTIVE)
    with count:
        oktopk.sparse_allreduce(torch.ones(40), 0.1, "topka")
    for at in (count.lines - 3, None):
        watch = InterruptAt(at if rank == 0 else None, COLLECTIVE)
        try:
            with watch:
                oktopk.sparse_allreduce(torch.ones(40), 0.1, "topka")
            said.append("no error")
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.processes
def test_an_interrupt_is_remembered_for_the_default_group() -> None:
    first, second = worlds.run("gloo", 2, interrupt_default)
    assert first[0].startswith("KeyboardInterrupt")
    assert "did not come to its end on this rank" in first[1]
    assert second[0] == "no error"  # it had all it needed
    assert "interrupted mid-step by KeyboardInterrupt" in second[1]
