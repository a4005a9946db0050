"""DistributedOptimizer and the gradients of backward: order, accumulation, missing ones, clipping, the start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oktopk
from tests.support.stepping import on_ranks
from tests.support.wrapping import (
    assert_replicas,
    batch,
    loss_of,
    make_model,
    momentum_sgd,
    plain_sgd,
    train,
    values,
    wrap,
)

ALL_DENSE = {"warmup_steps": 1000}


class Branches(nn.Module):
    """Three branches that can be used in any order, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        result = x[:, :3]
        for index in order:  # backward meets the last one first
            result = result + torch.tanh(self.parts[index](torch.cat([result, x[:, 3:]], 1)))
        return result


def branch_loss(model: nn.Module, rank: int, step: int, order: list[int]) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x, order), y)


@pytest.mark.parametrize("warmup", [0, 1000])
def test_gradients_that_come_in_another_order_on_another_rank(warmup: int) -> None:
    """Each branch is a bucket; buckets leave in one order on all ranks, so nobody waits for ever."""
    buckets = [[f"parts.{index}.{kind}" for kind in ("weight", "bias")] for index in range(3)]

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = Branches()
        with wrap(model, comm, buckets=buckets, warmup_steps=warmup) as optimizer:
            for step in range(6):
                order = [(comm.rank + step + i) % 3 for i in range(3)]
                optimizer.zero_grad()
                branch_loss(model, comm.rank, step, order).backward()
                optimizer.step()
        return values(model)

    assert_replicas(on_ranks(3, job))


@pytest.mark.parametrize("warmup", [0, 1000])
def test_parameters_without_gradient_on_some_or_all_ranks_count_as_zeros(warmup: int) -> None:
    def job(comm: oktopk.Communicator) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        model = Branches()
        options = {"density": 1.0, "warmup_steps": warmup, "buckets": "model", "values": "fp32"}
        with wrap(model, comm, plain_sgd, **options) as optimizer:
            branch_loss(model, comm.rank, 0, [0, 1] if comm.rank == 0 else [0]).backward()
            own = [_grad(p) for p in model.parameters()]
            optimizer.synchronize()
            averaged = [_grad(p) for p in model.parameters()]
            optimizer.step()
        return values(model), own, averaged

    results = on_ranks(2, job)
    assert_replicas(model for model, *_ in results)
    for own_0, own_1, averaged in zip(results[0][1], results[1][1], results[1][2], strict=True):
        torch.testing.assert_close(averaged, (own_0 + own_1) / 2)


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def test_frozen_parameters_are_left_alone() -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        model[0].weight.requires_grad_(False)
        with wrap(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(4))
        assert model[0].weight.grad is None
        assert torch.equal(model[0].weight, make_model()[0].weight)
        return values(model)

    assert_replicas(on_ranks(2, job))


# Several backward passes.


def test_two_backward_passes_are_one_big_batch() -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap(model, comm, backward_passes=2, **ALL_DENSE) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                for part in range(2):
                    (loss_of(model, comm.rank, 2 * step + part) / 2).backward()
                optimizer.step()
                assert optimizer._engine.step == step + 1
        return values(model)

    results = on_ranks(2, job)
    assert_replicas(results)
    reference = make_model()
    inner = momentum_sgd(reference.parameters())
    for step in range(3):
        inner.zero_grad()
        parts = [batch(rank, 2 * step + part) for rank in range(2) for part in range(2)]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        nn.functional.mse_loss(reference(x), y).backward()
        inner.step()
    for name, expected in values(reference).items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_one_backward_pass_too_many_is_an_error(passes: int) -> None:
    model = make_model()
    with wrap(model, None, backward_passes=passes):
        for _ in range(passes):
            loss_of(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match=r"came again before step\(\): set backward_passes"):
            loss_of(model, 0, 0).backward()


def test_fewer_backward_passes_than_planned_still_make_a_step() -> None:
    """The last step of an epoch may be short."""

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap(model, comm, backward_passes=3) as optimizer:
            train(model, optimizer, comm.rank, range(4))
        return values(model)

    one, other = on_ranks(2, job), on_ranks(2, lambda comm: _trained(comm, 4))
    assert_replicas([*one, *other])


def _trained(comm: oktopk.Communicator, steps: int) -> dict[str, Tensor]:
    model = make_model()
    with wrap(model, comm) as optimizer:
        train(model, optimizer, comm.rank, range(steps))
    return values(model)


def test_zero_grad_while_gradients_are_being_averaged_is_an_error() -> None:
    model = make_model()
    with wrap(model, None) as optimizer:
        loss_of(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match=r"before zero_grad\(\) call step\(\), synchronize\(\)"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.zero_grad()


# Clipping.


def test_clipping_between_synchronize_and_step() -> None:
    """The mean is clipped, and is not averaged again."""

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap(model, comm, plain_sgd, **ALL_DENSE) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                event = optimizer.synchronize()
                assert event.step == step
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            assert optimizer._engine.step == 3
        return values(model)

    results = on_ranks(2, job)
    reference = make_model()
    inner = plain_sgd(reference.parameters())
    for step in range(3):
        inner.zero_grad()
        (sum(loss_of(reference, rank, step) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        inner.step()
    assert_replicas(results)
    for name, expected in values(reference).items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-6)


def test_norm_clip_acts_on_each_rank_before_averaging() -> None:
    def job(comm: oktopk.Communicator) -> list[Tensor]:
        model = make_model()
        with wrap(model, comm, norm_clip=0.05, **ALL_DENSE) as optimizer:
            loss_of(model, comm.rank, 0).backward()
            optimizer.synchronize()
        return [_grad(p) for p in model.parameters()]

    results = on_ranks(2, job)
    clipped = []
    for rank in range(2):
        model = make_model()
        loss_of(model, rank, 0).backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 0.05
        clipped.append([_grad(p) for p in model.parameters()])
    for result, one, other in zip(results[1], *clipped, strict=True):
        torch.testing.assert_close(result, (one + other) / 2, rtol=1e-4, atol=1e-7)


# The start.


def noisy_model(rank: int) -> nn.Module:
    model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(3))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    with torch.no_grad():
        norm.running_mean.fill_(float(rank + 1))  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(10 + rank)
    return model


def test_all_ranks_start_with_the_parameters_and_buffers_of_rank_0() -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = noisy_model(comm.rank)
        wrap(model, comm).close()
        return values(model)

    results = on_ranks(3, job)
    assert_replicas([values(noisy_model(0)), *results])
    assert results[2]["1.num_batches_tracked"].item() == 10


def test_the_broadcast_can_be_left_out() -> None:
    def job(comm: oktopk.Communicator) -> None:
        model = noisy_model(comm.rank)
        wrap(model, comm, broadcast=False).close()
        assert_replicas([values(noisy_model(comm.rank)), values(model)])

    on_ranks(2, job)


def test_parameters_without_names_are_numbered() -> None:
    model = make_model()
    with oktopk.DistributedOptimizer(plain_sgd(model.parameters())) as optimizer:
        assert optimizer._gradients.buckets[0].names == ("group0.3", "group0.2", "group0.1", "group0.0")
        train(model, optimizer, 0, [0])
