"""LocalOptimizer: the laws of a step in which every rank's optimizer steps, and the mean of the updates counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from tests.support.stepping import (
    COUNTERS,
    EPSILON,
    SPARSE,
    assert_same_state,
    on_ranks,
    same_bits,
)
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

DENSE: dict[str, Any] = {"warmup_steps": 1000, "lr_scale": 1.0}
WHOLE: dict[str, Any] = {"algorithm": "topka", "density": 1.0, "warmup_steps": 0, "lr_scale": 1.0}
"""Sparse steps that send all there is."""


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.001, momentum=0.5)


def unfused_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1, foreach=False)


OPTIMIZERS: list[MakeOptimizer] = [momentum_sgd, adamw, unfused_adam, rmsprop]


def large_model() -> nn.Sequential:
    """Weights between 1 and 2: an update at most halves or doubles one, so that θ + (θ' − θ) is θ' to the bit."""
    model = make_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1 + torch.rand(parameter.shape, generator=generator))
    return model


def small_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return 0.001 * loss_of(model, rank, step)


@pytest.mark.parametrize("options", [DENSE, WHOLE], ids=["dense", "sparse"])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_one_rank_that_sends_everything_is_the_plain_optimizer_to_the_bit(
    make: MakeOptimizer, options: dict[str, Any]
) -> None:
    model, plain = large_model(), large_model()
    inner = make(plain.parameters())
    with wrap_local(model, None, make, **options) as optimizer:
        for step in range(8):
            for net, stepping in ((model, optimizer), (plain, inner)):
                stepping.zero_grad()
                small_loss(net, 0, step).backward()
                stepping.step()
            assert_replicas([values(model), values(plain)])
        torch.testing.assert_close(
            optimizer.inner.state_dict()["state"], inner.state_dict()["state"], rtol=0, atol=0
        )


@dataclass
class Rank:
    """One rank of local training, in plain torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def simulate(world: int, make: MakeOptimizer, rounds: int, local_steps: int = 1) -> dict[str, Tensor]:
    """Local training as it is defined: the parameters after some rounds, whose updates are averaged in full."""
    ranks = []
    for _ in range(world):
        model = make_model()
        ranks.append(Rank(model, make(model.parameters())))
    for number in range(rounds):
        start = [p.detach().clone() for p in ranks[0].model.parameters()]
        for rank, one in enumerate(ranks):
            train(one.model, one.optimizer, rank, range(number * local_steps, (number + 1) * local_steps))
        with torch.no_grad():
            for place, begun in enumerate(start):
                of_ranks = [list(one.model.parameters())[place] for one in ranks]
                mean = torch.stack([p.double() - begun.double() for p in of_ranks]).mean(0)
                for parameter in of_ranks:
                    parameter.copy_(begun.double() + mean)
    return values(ranks[0].model)


@pytest.mark.parametrize("options", [DENSE, WHOLE], ids=["dense", "sparse"])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_ranks_that_send_everything_apply_the_mean_of_their_updates(
    make: MakeOptimizer, options: dict[str, Any]
) -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm, make, **options) as optimizer:
            train(model, optimizer, comm.rank, range(5))
        return values(model)

    expected = simulate(3, make, 5)
    ranks = on_ranks(3, job)
    assert_replicas(ranks)
    torch.testing.assert_close(ranks[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", SPARSE)
def test_replicas_stay_identical_over_sparse_steps(algorithm: str, dtype: torch.dtype) -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model(seed=comm.rank).to(dtype)  # which start as those of rank 0
        with wrap_local(model, comm, algorithm=algorithm, values="fp16") as optimizer:
            for step in range(20):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(100 * step + comm.rank)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
                optimizer.step()
            assert optimizer.stats()["sparse"] == 1.0
            found = common(model, optimizer)
        assert not torch.equal(found["0.weight"], make_model()[0].weight.to(dtype))
        return {name: value.float() for name, value in found.items()}

    assert_replicas(on_ranks(3, job))


# Error feedback in the units of updates.


LR, DECAY = 0.01, 0.5


class Watched(torch.optim.AdamW):
    """Remembers what each step has added to the parameters, and what they were before it."""

    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        self.before = [p.detach().clone() for p in held]
        result = super().step(closure)
        self.added = [p.detach() - old for p, old in zip(held, self.before, strict=True)]
        return result


@dataclass(frozen=True)
class Step:
    """One step on one rank, by name."""

    residual: dict[str, Tensor]
    base: dict[str, Tensor]
    added: dict[str, Tensor]
    """By the optimizer alone."""
    mean: dict[str, Tensor]
    kept: dict[str, Tensor]
    common: dict[str, Tensor]
    """After the step, what all ranks have in common."""
    after: dict[str, Tensor]
    """What this rank has."""


def recorded(comm: oktopk.Communicator, steps: int, **options: Any) -> list[Step]:
    model = make_model()
    names, left = [name for name, _ in model.named_parameters()], 1 - LR * DECAY
    zeros = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    found = []

    def make(parameters: Iterable[nn.Parameter]) -> Watched:
        return Watched(parameters, lr=LR, weight_decay=DECAY)

    def residuals() -> dict[str, Tensor]:
        kept = saved(optimizer)["oktopk"]["residuals"]
        return {name: kept.get(name, zeros[name]).flatten().clone() for name in names}

    with wrap_local(model, comm, make, **options) as optimizer:
        inner: Any = optimizer.inner
        for step in range(steps):
            before, start = residuals(), common(model, optimizer)
            train(model, optimizer, comm.rank, [step])
            mean = {
                name: optimizer._gradients.flat(bucket)[place].clone()
                for bucket in optimizer._gradients.buckets
                for name, place in bucket.places.items()
            }
            added, after = dict(zip(names, inner.added, strict=True)), values(model)
            shrunk = [{name: left * part for name, part in parts.items()} for parts in (before, start)]
            found.append(Step(*shrunk, added, mean, residuals(), common(model, optimizer), after))
    return found


@pytest.mark.parametrize("codec", ["fp32", "e4m3"])
@pytest.mark.parametrize("algorithm", SPARSE)
def test_residuals_and_mean_have_all_that_ranks_would_have_added(algorithm: str, codec: str) -> None:
    """Σ residuals' + P · mean = Σ (what optimizers add + residuals); common' = base + mean, to the bit.

    Before, weight decay has shrunk parameters, and residuals as a part of them. Ranks have common' + residual'.
    """
    world = 3
    ranks = on_ranks(world, lambda comm: recorded(comm, 8, algorithm=algorithm, values=codec))
    for step in zip(*ranks, strict=True):
        for name, mean in step[0].mean.items():
            given = [(one.residual[name] + one.added[name].flatten()).double() for one in step]
            kept = sum(one.kept[name].double() for one in step)
            size = sum(part.abs() for part in given) + world * mean.abs().double()
            error = (kept + world * mean.double() - sum(given)).abs()
            weight = max(float(one.base[name].abs().max()) for one in step)  # updates are differences of these
            assert bool((error <= 16 * world * EPSILON * (size + weight)).all()), name
            for one in step:
                shape = one.base[name].shape
                assert same_bits({name: one.base[name] + mean.view(shape)}, {name: one.common[name]})
                assert same_bits({name: one.common[name] + one.kept[name].view(shape)}, {name: one.after[name]})
    assert any(bool(part.any()) for part in ranks[0][-1].kept.values())


def test_decoupled_decay_is_no_part_of_what_is_compressed() -> None:
    """With zero gradients AdamW adds nothing: parameters shrink on all ranks alike, and nothing is kept back."""
    lr, decay = 0.1, 0.5

    def job(comm: oktopk.Communicator) -> None:
        model = make_model()
        start = values(model)

        def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            first, *others = parameters
            groups = [{"params": [first], "weight_decay": 0.0}, {"params": others}]
            return torch.optim.AdamW(groups, lr=lr, weight_decay=decay)

        with wrap_local(model, comm, make, warmup_steps=0) as optimizer:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            model[2].bias.grad = None  # it shrinks all the same: another rank may have a gradient
            optimizer.step()
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, decay]
            assert not any(bool(part.any()) for part in saved(optimizer)["oktopk"]["residuals"].values())
        shrunk = {name: value * (1 - lr * decay) for name, value in start.items() if name != "0.weight"}
        assert_replicas([{**shrunk, "0.weight": start["0.weight"]}, values(model)])

    on_ranks(2, job)


def test_coupled_decay_is_a_part_of_the_update() -> None:
    model = make_model()
    with wrap_local(model, None, momentum_sgd, warmup_steps=0) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert any(bool(part.any()) for part in saved(optimizer)["oktopk"]["residuals"].values())


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_that_decouple_decay_without_saying_so(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    model = nn.Linear(4, 3, bias=False)
    before = values(model)
    inner = getattr(torch.optim, name)(model.parameters(), lr=0.1, weight_decay=0.5)
    with oktopk.LocalOptimizer(inner, model=model, warmup_steps=0, auto=False) as optimizer:
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    assert_replicas([{"weight": before["weight"] * (1 - 0.1 * 0.5)}, values(model)])


# Steps that are skipped.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["0.weight", "2.bias"])
@pytest.mark.parametrize("at", [1, 4], ids=["dense", "sparse"])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(at: int, where: str, bad: float) -> None:
    """Parameters, moments, residuals and thresholds are the same to the bit; the next step is as usual."""

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm, values="fp16") as optimizer:
            for step in range(6):
                before, state = values(model), saved(optimizer)
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                if (comm.rank, step) == (1, at):
                    dict(model.named_parameters())[where].grad.view(-1)[1] = bad
                optimizer.step()
                assert optimizer.skipped == (step == at)
                if step == at:
                    assert_replicas([before, values(model)])
                    assert_unchanged(state, saved(optimizer))
                    assert optimizer.last is not None
                    assert optimizer.last.culprits == (f"rank 1: {where}",)
                else:
                    assert not torch.equal(before["0.weight"], model[0].weight)
            assert optimizer.stats()["skipped_steps"] == 1
            return common(model, optimizer)

    assert_replicas(on_ranks(3, job))


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """But for the counters."""
    assert_same_state(before["oktopk"], after["oktopk"], but=COUNTERS)
    assert before["param_groups"] == after["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


def test_too_many_skipped_steps_in_a_row_are_an_error_on_every_rank() -> None:
    def job(comm: oktopk.Communicator) -> str:
        model = make_model()
        before = values(model)

        def spoilt_step() -> None:
            optimizer.zero_grad()
            (loss_of(model, comm.rank, 0) * (math.nan if comm.rank == 0 else 1)).backward()
            optimizer.step()

        with wrap_local(model, comm, max_skipped=3) as optimizer:
            spoilt_step()
            spoilt_step()
            with pytest.raises(oktopk.NonFiniteError, match="3 steps in a row") as raised:
                spoilt_step()
            assert_replicas([before, values(model)])
        return str(raised.value)

    for said in on_ranks(2, job):
        assert "rank 0: 0.weight" in said


def test_an_update_that_overflows_leaves_the_parameters_as_they_were() -> None:
    """The gradient is finite, so the optimizers have stepped; the engine finds the infinite update."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e38)

    def job(comm: oktopk.Communicator) -> None:
        model = make_model()
        before = values(model)
        with wrap_local(model, comm, make) as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                (loss_of(model, comm.rank, step) * (1e3 if comm.rank else 1e-30)).backward()
                optimizer.step()
                assert optimizer.skipped
                assert_replicas([before, values(model)])

    on_ranks(2, job)


@pytest.mark.parametrize("at", [1, 3], ids=["dense", "sparse"])
def test_an_optimizer_that_fails_on_one_rank_fails_on_all(at: int) -> None:
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if self.fails:
                raise RuntimeError("out of luck")
            return result

    said: list[str] = []

    def job(comm: oktopk.Communicator) -> None:
        model = make_model()
        with wrap_local(model, comm, Failing) as optimizer:
            train(model, optimizer, comm.rank, range(at))
            before = values(model)
            optimizer.inner.fails = comm.rank == 1  # type: ignore[attr-defined]
            try:
                train(model, optimizer, comm.rank, [at])
            except Exception as error:
                said.append(str(error))
                assert_replicas([before, values(model)])
                assert all(group["weight_decay"] == 0.01 for group in optimizer.param_groups)
                raise

    with pytest.raises(RuntimeError, match="out of luck"):
        on_ranks(2, job)
    assert len(said) == 2
    assert all("out of luck" in text for text in said)


@pytest.mark.parametrize("bad", [False, True])
def test_ranks_of_a_host_act_as_one(bad: bool) -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm, ranks_per_host=2) as optimizer:
            for step in range(6):
                before = values(model)
                optimizer.zero_grad()
                spoilt = bad and (comm.rank, step) == (3, 4)
                (loss_of(model, comm.rank, step) * (math.nan if spoilt else 1)).backward()
                optimizer.step()
                assert optimizer.skipped == (bad and step == 4)
                if optimizer.skipped:
                    assert_replicas([before, values(model)])
        return values(model)

    assert_replicas(on_ranks(4, job))


# Where the parameters are.


def test_a_gradient_sees_what_its_rank_has_not_sent() -> None:
    """The loss of a rank is that of the common parameters plus its residual, unless it is told otherwise."""

    def job(comm: oktopk.Communicator, local: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        model = make_model()
        with wrap_local(model, comm, local_parameters=local) as optimizer:
            train(model, optimizer, comm.rank, range(5))
            here = values(model)
            return here, common(model, optimizer), saved(optimizer)["oktopk"]["residuals"]

    for local in (True, False):
        ranks = on_ranks(2, lambda comm, local=local: job(comm, local))  # type: ignore[misc]
        assert_replicas(shared for _, shared, _ in ranks)
        for here, shared, kept in ranks:
            assert all(bool(part.any()) for part in kept.values())
            for name, part in kept.items():
                expected = shared[name] + part.view(shared[name].shape) if local else shared[name]
                assert_replicas([{name: expected}, {name: here[name]}])


def test_looking_does_not_change_the_run_and_saving_asks_for_it() -> None:
    def job(comm: oktopk.Communicator) -> None:
        looked, plain = make_model(), make_model()
        with wrap_local(looked, comm) as one, wrap_local(plain, comm) as other:
            for step in range(6):
                train(looked, one, comm.rank, [step])
                train(plain, other, comm.rank, [step])
                common(looked, one)
            assert_replicas([values(looked), values(plain)])
            with pytest.raises(RuntimeError, match=r"call synchronize\(\) on all ranks before you save"):
                other.state_dict()
            other.synchronize()
            other.state_dict()

    on_ranks(2, job)


def test_after_synchronize_the_next_step_adds_the_residuals_again() -> None:
    """Though its gradient is that of the common parameters; and nothing is lost."""

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm, torch.optim.SGD, warmup_steps=0) as optimizer:
            train(model, optimizer, comm.rank, range(3))
            optimizer.synchronize()
            before, kept = values(model), optimizer.state_dict()["oktopk"]["residuals"]
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            here, after, still = values(model), common(model, optimizer), saved(optimizer)["oktopk"]["residuals"]
        found = {}
        for name, value in before.items():
            shapes = [part[name].view(value.shape) for part in (kept, still)]
            found[name] = torch.stack([*shapes, after[name] - value, here[name] - after[name]])
        return found

    ranks = on_ranks(2, job)
    for name in ranks[0]:
        kept, still, moved, ahead = torch.stack([rank[name] for rank in ranks]).double().unbind(1)
        torch.testing.assert_close(kept.sum(0), still.sum(0) + moved.sum(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(ahead, still, rtol=0, atol=1e-6)
        assert bool(moved.any())


# The learning rate.


@pytest.mark.parametrize(
    ("make", "world", "given", "scale"),
    [(adamw, 1, None, 1.0), (adamw, 2, None, 2**0.5), (adamw, 5, None, 2.0), (momentum_sgd, 2, None, 1.0),
     (adamw, 2, 3.0, 3.0), (momentum_sgd, 2, 0.5, 0.5)],
)  # fmt: skip
def test_local_steps_of_adaptive_optimizers_are_longer_on_more_ranks(
    make: MakeOptimizer, world: int, given: float | None, scale: float
) -> None:
    """One rank's second moment has more noise than that of the mean. Groups and weight decay stay as they are."""

    def job(comm: oktopk.Communicator) -> None:
        model, plain = make_model(), make_model()
        inner = make(plain.parameters())
        for group in inner.param_groups:
            group["lr"] *= scale
            if "betas" in group:
                group["weight_decay"] /= scale  # decoupled: lr * weight_decay is what counts
        with wrap_local(model, comm, make, warmup_steps=9, lr_scale=given) as optimizer:
            rates = [group["lr"] for group in optimizer.param_groups]
            for net, stepping in ((model, optimizer), (plain, inner)):
                train(net, stepping, 0, [0])  # the same gradients on all ranks: the mean is any rank's update
            assert [group["lr"] for group in optimizer.param_groups] == rates
        torch.testing.assert_close(values(model), values(plain), rtol=1e-5, atol=1e-6)

    on_ranks(world, job)


@pytest.mark.parametrize("plain", [False, True], ids=["own", "plain"])
def test_a_state_is_loaded_into_common_parameters_only(plain: bool) -> None:
    """Otherwise ranks would take what they have alone for what they have in common, and drift apart."""

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(5))
            state = optimizer.inner.state_dict() if plain else saved(optimizer)
            with pytest.raises(RuntimeError, match=r"call synchronize\(\) on all ranks, load the model"):
                optimizer.load_state_dict(state)
            optimizer.synchronize()
            optimizer.load_state_dict(state)
            kept = optimizer.state_dict()["oktopk"]["residuals"]
            assert any(bool(part.any()) for part in kept.values()) != plain  # then residuals start at zero
            train(model, optimizer, comm.rank, range(5, 8))
            return common(model, optimizer)

    assert_replicas(on_ranks(2, job))


def test_a_broadcast_and_the_end_leave_common_parameters() -> None:
    def job(comm: oktopk.Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = make_model()
        with wrap_local(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(5))
            before = common(model, optimizer)
            optimizer.broadcast(model)
            assert_replicas([before, values(model)])
            train(model, optimizer, comm.rank, range(5, 8))
            end = common(model, optimizer)
        return end, values(model)

    ranks = on_ranks(2, job)
    assert_replicas(one for rank in ranks for one in rank)
