"""Parameters that are frozen, unfrozen, added or of another kind: followed, or refused, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import oktopk
from tests.support import worlds
from tests.support.stepping import on_ranks
from tests.support.training import DDP, backward, hook_up, mlp, parameters_of, sgd
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


def error_of(action: Callable[..., object], *args: object) -> str | None:
    try:
        action(*args)
    except Exception as error:
        return str(error)
    return None


# The wrapped optimizer.


def change_later(
    comm: oktopk.Communicator,
    change: Callable[[nn.Module], None],
    start: Callable[[nn.Module], None],
    **options: Any,
) -> list[dict[str, Tensor]]:
    """The parameters at the start, when the model changes, and at the end: some steps dense, some sparse."""
    model = make_model()
    start(model)
    found = [values(model)]
    with wrap(model, comm, momentum_sgd, warmup_steps=2, **options) as optimizer:
        train(model, optimizer, comm.rank, range(5))
        change(model)
        found.append(values(model))
        train(model, optimizer, comm.rank, range(5, 9))
        found.append(values(model))
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, comm.rank, range(9, 10))
    return [*found, values(model)]


def freeze(model: nn.Module) -> None:
    model[0].requires_grad_(False)


def thaw(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def swap(model: nn.Module) -> None:
    thaw(model)
    model[2].requires_grad_(False)


def leave(model: nn.Module) -> None:
    pass


PLANS: dict[str, Any] = {"a bucket each": {}, "one bucket": {"buckets": 25.0}}


@pytest.mark.parametrize("plan", PLANS)
def test_a_layer_that_is_frozen_later_does_not_move(plan: str) -> None:
    """Neither by its residual, nor by momentum or weight decay. The others go on, the same on all ranks."""
    ranks = on_ranks(2, lambda comm: change_later(comm, freeze, leave, **PLANS[plan]))
    for phase in zip(*ranks, strict=True):
        assert_replicas(phase)
    start, frozen, *later = ranks[0]
    assert not torch.equal(start["0.weight"], frozen["0.weight"])
    for now in later:
        assert torch.equal(now["0.weight"], frozen["0.weight"])
        assert torch.equal(now["0.bias"], frozen["0.bias"])
        assert not torch.equal(now["2.weight"], frozen["2.weight"])


@pytest.mark.parametrize("change", [thaw, swap])
def test_a_layer_that_is_unfrozen_later_is_averaged(change: Callable[[nn.Module], None]) -> None:
    names = {"buckets": 25.0}  # wrap() names the buckets of what requires a gradient
    ranks = on_ranks(2, lambda comm: change_later(comm, change, freeze, **names))
    for phase in zip(*ranks, strict=True):
        assert_replicas(phase)
    start, frozen, thawed, _ = ranks[0]
    assert torch.equal(start["0.weight"], frozen["0.weight"])
    assert not torch.equal(thawed["0.weight"], frozen["0.weight"])
    assert torch.equal(thawed["2.weight"], frozen["2.weight"]) == (change is swap)


def test_a_frozen_layer_keeps_its_residual_until_it_is_unfrozen() -> None:
    def rank(comm: oktopk.Communicator) -> tuple[Tensor, Tensor]:
        model = make_model()
        with wrap(model, comm, warmup_steps=0) as optimizer:
            train(model, optimizer, comm.rank, range(3))
            before = optimizer.state_dict()["oktopk"]["residuals"]["0.weight"]
            freeze(model)
            train(model, optimizer, comm.rank, range(3, 6))
            state = optimizer.state_dict()
            thaw(model)
            train(model, optimizer, comm.rank, range(6, 7))
            freeze(model)
            optimizer.load_state_dict(state)  # of a time when other layers were frozen
            return before, optimizer.state_dict()["oktopk"]["residuals"]["0.weight"]

    for before, after in on_ranks(2, rank):
        assert torch.count_nonzero(before)
        assert torch.equal(before, after)


def test_the_residual_of_a_frozen_layer_must_have_its_size() -> None:
    """It is used when the layer is unfrozen, long after the checkpoint was loaded."""
    model = make_model()
    freeze(model)
    with wrap(model, None, warmup_steps=0) as optimizer:
        train(model, optimizer, 0, range(2))
        state = optimizer.state_dict()
        state["oktopk"]["residuals"]["0.weight"] = torch.ones(7)
        with pytest.raises(ValueError, match=r"residuals of 0\.weight have 7 entries, the parameter 96"):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("warmup", [0, 100])
def test_a_layer_that_one_rank_freezes_is_an_error_on_all(warmup: int) -> None:
    def rank(comm: oktopk.Communicator) -> None:
        model = make_model()
        with wrap(model, comm, warmup_steps=warmup) as optimizer:
            train(model, optimizer, comm.rank, range(2))
            if comm.rank:
                freeze(model)
            train(model, optimizer, comm.rank, range(2, 5))

    with pytest.raises((oktopk.OkTopkError, ValueError)):
        on_ranks(2, rank, timeout=1.0)


def test_a_layer_that_is_unfrozen_in_the_middle_of_a_step_is_an_error() -> None:
    model = make_model()
    freeze(model)
    with wrap(model, None, buckets=25.0) as optimizer:
        loss_of(model, 0, 0).backward()
        thaw(model)
        loss_of(model, 0, 0)
        with pytest.raises(RuntimeError, match=r"0\.bias was unfrozen in the middle of a step"):
            optimizer.synchronize()


def test_a_model_that_is_frozen_as_a_whole_is_an_error() -> None:
    model = make_model()
    with wrap(model, None) as optimizer:
        model.requires_grad_(False)
        with pytest.raises(ValueError, match="no parameter requires a gradient any more"):
            optimizer.step()


def test_parameters_that_bypass_add_param_group_are_an_error() -> None:
    model, more = make_model(), make_model(1)
    with wrap(model, None) as optimizer:
        optimizer.param_groups[0]["params"].extend(more.parameters())
        with pytest.raises(ValueError, match=r"not averaged: add them by add_param_group\(\)"):
            loss_of(model, 0, 0).backward()


def bad_group(why: str, model: nn.Module, wrong: bool) -> dict[str, Any]:
    """A group to add; with `wrong`, one that cannot be averaged."""
    good, bad = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    if why == "complex":
        bad = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    elif why == "another shape":
        bad = nn.Parameter(torch.zeros(4))
    elif why == "frozen":
        bad.requires_grad_(False)
    elif why == "there already":
        bad = model[0].weight
    return {"params": [bad if wrong else good]} | ({"momentum": 0.9} if why == "momentum" and wrong else {})


REFUSED = {
    "complex": "unsupported dtype torch.complex64 of parameter group1.0",
    "another shape": "ranks disagree on shapes",
    "frozen": "ranks disagree on parameters that require a gradient",
    "there already": "some parameters appear in more than one parameter group",
    "momentum": "momentum correction (momentum=0.5) replaces the optimizer's own momentum",
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_group_that_one_rank_refuses_is_added_on_none(why: str) -> None:
    """All ranks have the error, nothing has changed, and training goes on as if nothing had happened."""

    def rank(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model, twin = make_model(), make_model()
        options = {"momentum": 0.5} if why == "momentum" else {}
        with wrap(twin, comm, plain_sgd, **options) as optimizer:
            train(twin, optimizer, comm.rank, range(6))
        with wrap(model, comm, plain_sgd, **options) as optimizer:
            train(model, optimizer, comm.rank, range(3))
            said = error_of(optimizer.add_param_group, bad_group(why, model, wrong=comm.rank == 1))
            assert said is not None
            assert REFUSED[why] in said
            assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1
            train(model, optimizer, comm.rank, range(3, 6))
        assert_replicas([values(model), values(twin)])
        return values(model)

    assert_replicas(on_ranks(3, rank, timeout=5.0))


def test_a_group_whose_names_are_taken_is_refused() -> None:
    model = nn.Module()
    model.group1 = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    with wrap(model, None, buckets="model") as optimizer:
        with pytest.raises(ValueError, match=r"has a parameter group1\.0 already"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert len(optimizer.param_groups) == 1


def test_shared_parameters_are_averaged_once() -> None:
    def rank(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        model.append(nn.Linear(3, 3))
        model.append(nn.Linear(3, 3))
        model[4].weight = model[3].weight
        with wrap(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(5))
            assert "4.weight" not in optimizer.state_dict()["oktopk"]["residuals"]
        return values(model)

    assert_replicas(on_ranks(2, rank))


# The all-reducer.


def test_the_all_reducer_follows_frozen_parameters() -> None:
    model = make_model()
    with oktopk.AllReducer(model.named_parameters(), warmup_steps=0) as reducer:

        def sync() -> set[str]:
            model.zero_grad()
            loss_of(model, 0, reducer.step).backward()
            return set(reducer.sync({name: p.grad for name, p in model.named_parameters()}))

        every = sync()
        freeze(model)
        assert sync() == {"2.weight", "2.bias"}
        with pytest.raises(ValueError, match=r"0\.bias does not require a gradient, so it is not averaged"):
            reducer.sync({"0.bias": torch.zeros(16)})
        thaw(model)
        assert sync() == every


# Gradients of other kinds are refused when a model is registered.


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self) -> Tensor:
        return self.phase.abs().sum()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)

    def forward(self) -> Tensor:
        return self.words(torch.tensor([1, 2])).sum()


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (Complex, "unsupported dtype torch.complex64 of parameter"),
    "sparse": (Sparse, "unsupported sparse gradients of"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_cannot_be_averaged_are_refused_by_the_wrapper(kind: str) -> None:
    make, said = KINDS[kind]
    model = make()
    with pytest.raises(ValueError, match=said):
        oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
    model.requires_grad_(False)
    model.good = nn.Parameter(torch.zeros(3))
    if kind == "complex":
        with oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model):
            pass


def test_complex_parameters_are_refused_by_the_all_reducer() -> None:
    with pytest.raises(ValueError, match="complex64 of parameter phase"):
        oktopk.AllReducer(Complex().named_parameters())


# DDP.


@contextmanager
def python_reducer() -> Iterator[None]:
    before, torch._dynamo.config.optimize_ddp = torch._dynamo.config.optimize_ddp, "python_reducer"
    try:
        yield
    finally:
        torch._dynamo.config.optimize_ddp = before


def refused(connect: Callable[..., Any]) -> dict[str, str]:
    found = {}
    for kind, (make, _) in KINDS.items():
        net = DDP(make())
        with oktopk.OkTopkState(timeout=20) as state:
            found[kind] = error_of(state.register, net)
        with oktopk.OkTopkState(timeout=20, warmup_steps=0) as state:  # which is told nothing about the model
            net.register_comm_hook(state, oktopk.oktopk_hook)
            found[f"{kind} in the hook"] = error_of(lambda net=net: net().backward())
    with python_reducer(), oktopk.OkTopkState(timeout=20) as state:
        found["python_reducer"] = error_of(state.register, DDP(mlp()))
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    net = DDP(mlp(), mixed_precision=half)
    with oktopk.OkTopkState(timeout=20) as state:
        found["mixed_precision"] = error_of(state.register, net)
    return found


def test_models_that_the_hook_cannot_average_are_refused() -> None:
    for found in worlds.run("gloo", 2, refused):
        for kind, (_, said) in KINDS.items():
            assert said in found[kind]
        assert "unsupported dtype torch.complex64 of parameter #0" in found["complex in the hook"]
        assert "unsupported sparse gradients" in found["sparse in the hook"]
        assert "python_reducer" in found["python_reducer"]
        assert "mixed_precision=…) has a communication hook of its own" in found["mixed_precision"]


def refused_optimizers(connect: Callable[..., Any]) -> list[str | None]:
    """One rank passes an optimizer that cannot be guarded; afterwards all ranks pass a good one."""
    net = DDP(mlp())
    with oktopk.OkTopkState(timeout=20, warmup_steps=0, momentum=0.5) as state:
        good = sgd(net, momentum=0.0)
        found = []
        for bad in (sgd(net), "an optimizer"):
            found.append(error_of(state.register, net, bad if dist.get_rank() else good))
            assert not net._comm_hooks
            assert not state._guard.handles
        state.register(net, good)
        backward(net, dist.get_rank(), 0)
        good.step()
    return found


def test_an_optimizer_that_one_rank_refuses_registers_nothing() -> None:
    for rank, (momentum, kind) in enumerate(worlds.run("gloo", 2, refused_optimizers)):
        assert "momentum correction (momentum=0.5) replaces" in momentum, rank
        assert "optimizer must be a torch.optim.Optimizer, got str" in kind, rank


def ddp_changes(connect: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for change in ("unfrozen", "frozen", "frozen, which DDP can handle"):
        model = mlp()
        model[0].requires_grad_(change != "unfrozen")
        net = DDP(model, bucket_cap_mb=0.001, find_unused_parameters="can" in change)
        optimizer = sgd(net)
        with hook_up(net, optimizer, warmup_steps=1, timeout=20) as state:
            for step in range(4):
                optimizer.zero_grad()
                backward(net, dist.get_rank(), step)
                optimizer.step()
            model[0].requires_grad_(change == "unfrozen")
            before = parameters_of(net)
            optimizer.zero_grad()
            found[change] = error_of(backward, net, dist.get_rank(), 5)
            if found[change] is None:
                optimizer.step()
                after = parameters_of(net)
                found[change] = sorted(name for name in after if torch.equal(before[name], after[name]))
        del state
    return found


def test_changes_that_ddp_does_not_follow_are_an_error() -> None:
    for found in worlds.run("gloo", 2, ddp_changes):
        assert "0.weight was unfrozen after the DistributedDataParallel model was made" in found["unfrozen"]
        assert "find_unused_parameters=True" in found["frozen"]
        assert found["frozen, which DDP can handle"] == ["0.bias", "0.weight"]


def one_rank_unfreezes(connect: Callable[..., Any]) -> str | None:
    model = mlp()
    model[0].requires_grad_(False)
    net = DDP(model)
    with hook_up(net, warmup_steps=1, timeout=60):
        backward(net, dist.get_rank(), 0)
        model[0].requires_grad_(dist.get_rank() == 1)
        return error_of(backward, net, dist.get_rank(), 1)


def test_what_one_rank_finds_is_an_error_on_all() -> None:
    first, second = worlds.run("gloo", 2, one_rank_unfreezes)
    assert "rank 1 failed" in first
    assert "was unfrozen" in first
    assert "was unfrozen" in second
