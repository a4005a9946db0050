"""Skipped steps are counted and told; too many in a row are an error on all ranks."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import oktopk
from tests.support import stepping


def bad_steps(*bad: int) -> stepping.Edit:
    def edit(rank: int, step: int, grads: stepping.Grads) -> None:
        if rank == 1 and step in bad:
            grads["b"][0] = math.nan

    return edit


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_too_many_in_a_row_are_an_error_on_all_ranks(world: int, warmup: int) -> None:
    """Two, a good one that resets the count, then three: the third is one too many."""

    def job(comm: oktopk.Communicator) -> tuple[int, str, str]:
        reducer = stepping.reducer_on(comm, warmup_steps=warmup, max_skipped=3)
        with pytest.raises(oktopk.NonFiniteError) as error:
            stepping.record_steps(reducer, comm.rank, range(9), bad_steps(1, 2, 4, 5, 6))
        done = reducer.step
        with pytest.raises(oktopk.NonFiniteError) as again:
            reducer._engine.drain()
        reducer.close()
        return done, str(error.value), str(again.value)

    for done, message, again in stepping.on_ranks(world, job):
        assert done == 7  # steps 0 to 6
        assert "step 6" in message
        assert "rank 1: b" in message
        assert "3 steps in a row" in message
        assert again == message


def test_skipped_steps_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def job(comm: oktopk.Communicator) -> None:
        with stepping.reducer_on(comm, warmup_steps=0) as reducer:
            seen = []
            for step in range(6):
                stepping.record_steps(reducer, comm.rank, [step], bad_steps(2, 3))
                figures = reducer.stats()
                seen.append((reducer.skipped, figures["skipped_steps"], figures["skipped_in_a_row"]))
                assert reducer.step == step + 1
        no, yes = False, True
        assert seen == [(no, 0, 0), (no, 0, 0), (yes, 1, 1), (yes, 2, 2), (no, 2, 0), (no, 2, 0)]

    with caplog.at_level(logging.WARNING, logger="oktopk"):
        stepping.on_ranks(3, job)
    assert [record.getMessage() for record in caplog.records] == [
        f"oktopk: step {step} skipped on all ranks: non-finite gradients in rank 1: b" for step in (2, 3)
    ]


def test_only_a_few_parameters_are_named() -> None:
    names = [f"p{index}" for index in range(9)]

    def job(comm: oktopk.Communicator) -> tuple[str, ...]:
        parameters = {name: nn.Parameter(torch.zeros(4)) for name in names}
        with oktopk.AllReducer(parameters.items(), comm=comm, warmup_steps=0) as reducer:
            reducer.sync({name: torch.full((4,), math.inf) for name in names})
            assert reducer.last is not None
            return reducer.last.culprits

    for culprits in stepping.on_ranks(2, job):
        assert len(culprits) == 12
        assert {"rank 0: 4 more", "rank 1: 4 more"} < set(culprits)
