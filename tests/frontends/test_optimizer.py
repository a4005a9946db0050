"""DistributedOptimizer is an Optimizer: groups, states, schedulers, closures, scalers and life span."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from tests.support.stepping import on_ranks, through_a_file
from tests.support.wrapping import (
    assert_replicas,
    loss_of,
    make_model,
    momentum_sgd,
    plain_sgd,
    train,
    values,
    wrap,
)


def test_it_is_an_optimizer_and_shares_the_groups_of_the_inner_one() -> None:
    model = make_model()
    inner = momentum_sgd(model.parameters())
    with oktopk.DistributedOptimizer(inner, model.named_parameters()) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults["momentum"] == 0.9
        assert repr(optimizer).startswith("DistributedOptimizer (")
        assert "momentum: 0.9" in repr(optimizer)


def test_schedulers_set_the_rate_that_is_used() -> None:
    model = make_model()
    with wrap(model, None, plain_sgd) as optimizer:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
        train(model, optimizer, 0, [0])
        scheduler.step()
        assert optimizer.inner.param_groups[0]["lr"] == 0.0
        before = values(model)
        train(model, optimizer, 0, [1])
    assert_replicas([before, values(model)])


@pytest.mark.parametrize("algorithm", list(oktopk.ALGORITHMS))
def test_replicas_stay_identical_and_a_resumed_run_gives_the_same_bits(algorithm: str) -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        whole = make_model()
        with wrap(whole, comm, algorithm=algorithm) as optimizer:
            train(whole, optimizer, comm.rank, range(7))
            assert optimizer.stats()["sparse"] == float(algorithm != "dense")
        first = make_model()
        with wrap(first, comm, algorithm=algorithm) as optimizer:
            train(first, optimizer, comm.rank, range(4))
            state = through_a_file(optimizer.state_dict())
        second = make_model(seed=5)
        second.load_state_dict(values(first))
        with wrap(second, comm, algorithm=algorithm) as optimizer:
            optimizer.load_state_dict(state)
            assert optimizer.param_groups is optimizer.inner.param_groups
            train(second, optimizer, comm.rank, range(4, 7))
        assert_replicas([values(whole), values(second)])
        return values(whole)

    assert_replicas(on_ranks(3, job))


def test_the_state_of_a_plain_optimizer_will_do() -> None:
    model = make_model()
    plain = momentum_sgd(model.parameters())
    loss_of(model, 0, 0).backward()
    plain.step()
    other = make_model()
    other.load_state_dict(values(model))
    with wrap(other, None) as optimizer:
        optimizer.load_state_dict(through_a_file(plain.state_dict()))
        train(other, optimizer, 0, [1])
    plain.zero_grad()
    loss_of(model, 0, 1).backward()
    plain.step()
    assert_replicas([values(model), values(other)])


def test_a_state_without_its_own_part_fits_the_plain_optimizer() -> None:
    model = make_model()
    with wrap(model, None) as optimizer:
        train(model, optimizer, 0, range(3))
        state = optimizer.state_dict()
    assert state.pop("oktopk")["step"] == 3
    momentum_sgd(model.parameters()).load_state_dict(state)


def test_parameters_that_join_later_are_averaged_too() -> None:
    def job(comm: oktopk.Communicator) -> Tensor:
        model, late = make_model(), nn.Parameter(torch.zeros(4))
        with wrap(model, comm, plain_sgd, warmup_steps=100) as optimizer:
            train(model, optimizer, comm.rank, [0])
            optimizer.add_param_group({"params": [late], "lr": 1.0})
            assert len(optimizer.inner.param_groups) == 2
            optimizer.zero_grad()
            (loss_of(model, comm.rank, 1) + late.sum() * (comm.rank + 1)).backward()
            optimizer.step()
            assert optimizer.last is not None
            assert len(optimizer.last.reductions) == 3
        return late.detach()

    for late in on_ranks(3, job):
        assert late.tolist() == [-2.0] * 4


# Closures.


def test_a_closure_gives_the_mean_loss_and_the_same_step() -> None:
    def job(comm: oktopk.Communicator) -> tuple[float, float]:
        model, other = make_model(), make_model()
        with wrap(model, comm) as one, wrap(other, comm) as two:
            for step in range(4):
                train(model, one, comm.rank, [step])

                def closure(step: int = step) -> Tensor:
                    two.zero_grad()
                    loss = loss_of(other, comm.rank, step)
                    loss.backward()
                    return loss

                own = float(loss_of(other, comm.rank, step).detach())
                mean = two.step(closure)
        assert_replicas([values(model), values(other)])
        return own, float(mean)

    results = on_ranks(2, job)
    expected = sum(own for own, _ in results) / 2
    assert [mean for _, mean in results] == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("warmup", [0, 100])
def test_lbfgs_with_a_line_search_takes_the_same_way_on_all_ranks(warmup: int) -> None:
    """It evaluates the closure as often as it likes; losses and data differ from rank to rank."""

    def job(comm: oktopk.Communicator) -> tuple[int, dict[str, Tensor], float, float]:
        model = make_model(seed=comm.rank)
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, 0)
            loss.backward()
            return loss

        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")

        with wrap(model, comm, make, warmup_steps=warmup) as optimizer:
            losses = [float(optimizer.step(closure)) for _ in range(3)]
        return evaluations, values(model), losses[0], losses[-1]

    results = on_ranks(3, job)
    assert len({evaluations for evaluations, *_ in results}) == 1
    assert results[0][0] > 6
    assert_replicas(model for _, model, *_ in results)
    if warmup:
        assert results[0][3] < results[0][2]


def test_a_lost_closure_step_changes_nothing() -> None:
    def job(comm: oktopk.Communicator) -> None:
        model = make_model()
        with wrap(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(3))
            before = values(model)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, comm.rank, 3) * (math.nan if comm.rank == 1 else 1.0)
                loss.backward()
                return loss

            optimizer.step(closure)
            assert optimizer.skipped
        assert_replicas([before, values(model)])

    on_ranks(2, job)


# Lost steps, with and without a scaler.


@pytest.mark.parametrize("make", [momentum_sgd, torch.optim.AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("bad", [1, 4], ids=["dense", "sparse"])
def test_a_lost_step_leaves_parameters_and_state_untouched(make: Any, bad: int) -> None:
    def job(comm: oktopk.Communicator) -> None:
        model = make_model()
        with wrap(model, comm, make) as optimizer:
            for step in range(6):
                before, state = values(model), through_a_file(optimizer.inner.state_dict())
                optimizer.zero_grad()
                loss = loss_of(model, comm.rank, step)
                (loss * math.inf if comm.rank == 0 and step == bad else loss).backward()
                optimizer.step()
                assert optimizer.skipped == (step == bad)
                moved = any(not torch.equal(before[name], now) for name, now in values(model).items())
                assert moved == (step != bad)
                if step == bad:
                    torch.testing.assert_close(optimizer.inner.state_dict(), state, rtol=0, atol=0)

    on_ranks(2, job)


def test_a_grad_scaler_halves_its_scale_on_all_ranks_and_goes_on() -> None:
    def job(comm: oktopk.Communicator) -> tuple[dict[str, Tensor], float]:
        model, plain = make_model(), make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        with wrap(model, comm, grad_scaler=scaler) as optimizer, wrap(plain, comm) as other:
            for step in range(6):
                train(plain, other, comm.rank, [step] if step != 3 else [])
                optimizer.zero_grad()
                scaler.scale(
                    loss_of(model, comm.rank, step) * (math.inf if (comm.rank, step) == (1, 3) else 1)
                ).backward()
                optimizer.synchronize()
                before = values(model)
                scaler.step(optimizer)
                scaler.update()
                if step == 3:
                    assert_replicas([before, values(model)])
            assert optimizer.stats()["skipped_steps"] == 1
        for name, value in values(plain).items():
            torch.testing.assert_close(values(model)[name], value)
        return values(model), float(scaler.get_scale())

    results = on_ranks(2, job)
    assert_replicas(model for model, _ in results)
    assert [scale for _, scale in results] == [128.0, 128.0]


def test_a_scaler_without_synchronize_is_an_error() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with wrap(model, None, grad_scaler=scaler) as optimizer:
        scaler.scale(loss_of(model, 0, 0)).backward()
        with pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\) after backward"):
            scaler.step(optimizer)


# Metrics and life span.


def test_set_trainer_fills_the_lists_from_then_on() -> None:
    model, trainer = make_model(), SimpleNamespace()
    with wrap(model, None) as optimizer:
        train(model, optimizer, 0, [0])
        optimizer.set_trainer(trainer)
        train(model, optimizer, 0, range(1, 4))
    assert trainer.sparsities[0] == 0.0
    assert 0.8 < trainer.sparsities[1] < 1.0
    assert [len(trainer.sparsities), len(trainer.compression_ratios), len(trainer.communication_sizes)] == [
        3,
        3,
        3,
    ]


def test_close_ends_hooks_and_threads_and_leaves_the_inner_optimizer() -> None:
    model = make_model()

    def workers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("oktopk worker")]

    before = len(workers())
    with wrap(model, None) as optimizer:
        train(model, optimizer, 0, [0])
        assert len(workers()) == before + 1
    optimizer.close()
    assert len(workers()) == before
    for _ in range(3):  # nobody counts them any more
        loss_of(model, 0, 1).backward()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    optimizer.inner.step()


def test_what_it_cannot_wrap_is_an_error() -> None:
    model = make_model()
    inner = plain_sgd(model.parameters())
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got Sequential"):
        oktopk.DistributedOptimizer(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backward_passes must be at least 1, got 0"):
        oktopk.DistributedOptimizer(inner, model=model, backward_passes=0)
    with pytest.raises(ValueError, match=r"3 parameters of the optimizer are not in named_parameters"):
        oktopk.DistributedOptimizer(inner, [("w", model[0].weight)])
    with pytest.raises(ValueError, match="two parameters have the same name"):
        oktopk.DistributedOptimizer(inner, [("w", p) for p in model.parameters()])


def test_a_state_that_is_loaded_ends_the_step_before_it() -> None:
    """What was averaged before belongs to another state: it is neither applied nor missed."""
    weights = torch.nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD([weights], 1.0)
    with oktopk.DistributedOptimizer(inner, density=1.0, warmup_steps=0, auto=False) as optimizer:
        saved = optimizer.state_dict()
        weights.grad = None
        weights.sum().backward()
        optimizer.synchronize()
        assert not optimizer._applied
        optimizer.load_state_dict(saved)
        assert optimizer._applied  # else this rank alone asks the others what became of the step
        optimizer.zero_grad()
        (2 * weights).sum().backward()
        optimizer.step()
    assert torch.equal(weights.detach(), torch.full((4,), -1.0))
