"""LocalOptimizer with several local steps between exchanges: the laws of local SGD."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

import oktopk
from tests.frontends.test_local_optimizer import DENSE, simulate
from tests.support.stepping import on_ranks
from tests.support.wrapping import (
    MakeOptimizer,
    adamw,
    assert_replicas,
    common,
    loss_of,
    make_model,
    momentum_sgd,
    saved,
    train,
    values,
    wrap_local,
)


@pytest.mark.parametrize("make", [momentum_sgd, adamw], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("every", [2, 5])
def test_dense_rounds_are_local_training_as_it_is_defined(every: int, make: MakeOptimizer) -> None:
    """Ranks differ within a round, and are the same to the bit after it."""

    def job(comm: oktopk.Communicator) -> list[dict[str, Tensor]]:
        model, found = make_model(), []
        with wrap_local(model, comm, make, sync_every=every, **DENSE) as optimizer:
            for step in range(3 * every):
                train(model, optimizer, comm.rank, [step])
                found.append(values(model))
            assert optimizer.stats()["step"] == 3
        return found

    ranks = on_ranks(3, job)
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        if (step + 1) % every == 0:
            assert_replicas(of_ranks)
        else:
            assert not torch.equal(of_ranks[0]["0.weight"], of_ranks[1]["0.weight"])
    torch.testing.assert_close(ranks[0][-1], simulate(3, make, 3, every), rtol=1e-4, atol=1e-6)


def test_sparse_rounds_keep_replicas_and_resume_between_rounds() -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        whole, first, second = make_model(), make_model(), make_model(seed=5)
        with wrap_local(whole, comm, sync_every=3) as optimizer:
            train(whole, optimizer, comm.rank, range(15))
            assert optimizer.stats()["sparse"] == 1.0
        with wrap_local(first, comm, sync_every=3) as optimizer:
            train(first, optimizer, comm.rank, range(9))
            model, state = common(first, optimizer), saved(optimizer)
        second.load_state_dict(model)
        with wrap_local(second, comm, sync_every=3) as optimizer:
            optimizer.load_state_dict(state)
            optimizer.localize()
            train(second, optimizer, comm.rank, range(9, 15))
            found = common(second, optimizer)
        assert_replicas([values(whole), found])
        return found

    assert_replicas(on_ranks(3, job))


def test_a_round_under_way_is_not_saved_but_may_end_early() -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm, sync_every=4) as optimizer:
            assert optimizer.synchronize() is None
            train(model, optimizer, comm.rank, range(6))
            with pytest.raises(RuntimeError, match=r"call synchronize\(\) on all ranks before you save"):
                optimizer.state_dict()
            with pytest.raises(RuntimeError, match=r"call synchronize\(\) before you add parameters"):
                optimizer.add_param_group({"params": []})
            event = optimizer.synchronize()
            assert event is not None
            assert event.step == 1
            assert optimizer.synchronize() is event
            optimizer.state_dict()
            train(model, optimizer, comm.rank, range(6, 10))
            assert optimizer.stats()["step"] == 3
            return common(model, optimizer)

    assert_replicas(on_ranks(2, job))


def test_a_rank_leaves_out_a_step_alone_but_a_lost_round_is_lost_on_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = 3

    def job(comm: oktopk.Communicator) -> list[dict[str, Tensor]]:
        model, found = make_model(), [values(make_model())]
        with wrap_local(model, comm, sync_every=every) as optimizer:
            for step in range(9):
                # One step of the first round, all of the second one, none of the third.
                spoilt = comm.rank == 1 and (step == 2 or step // every == 1)
                optimizer.zero_grad()
                (loss_of(model, comm.rank, step) * (math.nan if spoilt else 1.0)).backward()
                optimizer.step()
                if (step + 1) % every == 0:
                    assert optimizer.skipped == (step // every == 1)
                    found.append(common(model, optimizer))
        return found

    with caplog.at_level(logging.WARNING, "oktopk"):
        ranks = on_ranks(2, job)
    for of_ranks in zip(*ranks, strict=True):
        assert_replicas(of_ranks)
    start, first, second, third = ranks[0]
    assert not torch.equal(start["0.weight"], first["0.weight"])
    assert_replicas([first, second])
    assert not torch.equal(second["0.weight"], third["0.weight"])
    assert all(bool(value.isfinite().all()) for value in third.values())
    said = [record.getMessage() for record in caplog.records]
    assert sum("rank 1 leaves out a local step" in text for text in said) == 3
    assert sum("step 1 skipped on all ranks: non-finite gradients in rank 1: " in text for text in said) == 1


def test_decay_over_a_round_is_no_part_of_what_is_compressed() -> None:
    """Zero gradients, and a learning rate that changes within the round: only the product of the decays acts."""
    rates, decay = (0.1, 0.2, 0.3), 0.5

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        start = values(model)
        with wrap_local(model, comm, torch.optim.AdamW, sync_every=3, warmup_steps=0) as optimizer:
            for rate in rates:
                optimizer.param_groups[0] |= {"lr": rate, "weight_decay": decay}
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            for kept in saved(optimizer)["oktopk"]["residuals"].values():
                assert float(kept.abs().max()) < 1e-6  # but for rounding
            found = common(model, optimizer)
        left = math.prod(1 - rate * decay for rate in rates)
        torch.testing.assert_close(found, {name: value * left for name, value in start.items()})
        return found

    assert_replicas(on_ranks(2, job))
