"""LocalOptimizer is an Optimizer: groups, schedulers, closures, scalers, checkpoints, moments, and mistakes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import oktopk
from oktopk.frontends import base
from oktopk.metrics.sinks import MemorySink
from tests.support import worlds
from tests.support.stepping import SPARSE, on_ranks, through_a_file
from tests.support.training import DDP, backward, error_of, mlp, parameters_of, same_bits
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
    wrap,
    wrap_local,
)


def test_it_is_an_optimizer_and_shares_the_groups_of_the_inner_one() -> None:
    model = make_model()
    inner = adamw(model.parameters())
    with oktopk.LocalOptimizer(inner, model.named_parameters()) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert repr(optimizer).startswith("LocalOptimizer (")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
        train(model, optimizer, 0, [0])
        scheduler.step()
        assert inner.param_groups[0]["lr"] == 0.0
        before = values(model)
        train(model, optimizer, 0, [1])
        assert_replicas([before, values(model)])


def test_a_closure_is_called_once_and_its_loss_is_this_ranks_own() -> None:
    def job(comm: oktopk.Communicator) -> float:
        model, other = make_model(), make_model()
        with wrap_local(model, comm) as one, wrap_local(other, comm) as two:
            calls = 0
            for step in range(4):
                train(model, one, comm.rank, [step])

                def closure(step: int = step) -> Tensor:
                    nonlocal calls
                    calls += 1
                    two.zero_grad()
                    loss = loss_of(other, comm.rank, step)
                    loss.backward()
                    return loss

                own = float(loss_of(other, comm.rank, step).detach())
                assert float(two.step(closure).detach()) == own
            assert calls == 4
        assert_replicas([values(model), values(other)])
        return own

    assert len(set(on_ranks(2, job))) == 2


def test_gradients_accumulate_until_the_step() -> None:
    def job(comm: oktopk.Communicator) -> None:
        model, other = make_model(), make_model()
        with wrap_local(model, comm, momentum_sgd) as one, wrap_local(other, comm, momentum_sgd) as two:
            for step in range(3):
                one.zero_grad()
                for part in (2 * step, 2 * step + 1):
                    loss_of(model, comm.rank, part).backward()
                one.step()
                two.zero_grad()
                torch.stack(
                    [loss_of(other, comm.rank, part) for part in (2 * step, 2 * step + 1)]
                ).sum().backward()
                two.step()
        torch.testing.assert_close(values(model), values(other))

    on_ranks(2, job)


def test_frozen_parameters_stay_and_late_ones_join() -> None:
    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model, late = make_model(), nn.Parameter(torch.full((4,), float(comm.rank)))
        with wrap_local(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(3))
            before = common(model, optimizer)  # where parameters stay when they are frozen
            model[0].weight.requires_grad_(False)
            model[0].weight.grad = torch.ones_like(model[0].weight)  # one that was left behind
            loss_of(model, comm.rank, 3).backward()
            optimizer.step()
            assert torch.equal(before["0.weight"], model[0].weight)
            assert not torch.equal(before["2.weight"], model[2].weight)
            model[0].weight.requires_grad_(True)
            optimizer.add_param_group({"params": [late], "lr": 0.5})
            optimizer.zero_grad()
            (loss_of(model, comm.rank, 4) + late.sum() * (comm.rank + 1)).backward()
            optimizer.step()
            assert not torch.equal(before["0.weight"], model[0].weight)
            optimizer.inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            with pytest.raises(ValueError, match=r"not averaged: add them by add_param_group"):
                optimizer.step()
            return {**common(model, optimizer), "late": late.detach()}

    ranks = on_ranks(2, job)
    assert_replicas(ranks)
    assert bool((ranks[0]["late"] < 0).any())


def test_sinks_and_the_trainer_see_every_step() -> None:
    class Trainer:
        pass

    def job(comm: oktopk.Communicator) -> tuple[list[str], int]:
        model, sink, trainer = make_model(), MemorySink(), Trainer()
        with wrap_local(model, comm, sinks=[sink], trainer=trainer) as optimizer:
            train(model, optimizer, comm.rank, range(4))
        sent = sink.steps[-1].wire.sent_bytes
        return [step.phase for step in sink.steps], len(vars(trainer)["sparsities"]) if sent else 0

    assert on_ranks(2, job) == [(["dense", "dense", "sparse", "sparse"], 4)] * 2


# A GradScaler.


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_scale_does_not_enter_residuals_and_backs_off_everywhere(
    clip: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With one infinite gradient: all ranks skip, and halve the scale. A run without a scaler is the same."""
    bad = 3
    caplog.set_level(logging.INFO, "oktopk")

    def job(comm: oktopk.Communicator) -> tuple[dict[str, Tensor], float]:
        model, plain = make_model(), make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        with wrap_local(model, comm, grad_scaler=scaler) as optimizer, wrap_local(plain, comm) as other:
            for step in range(6):
                for net, stepping in ((model, optimizer), (plain, other)):
                    spoilt = math.inf if (comm.rank, step) == (1, bad) else 1.0
                    stepping.zero_grad()
                    loss = loss_of(net, comm.rank, step) * spoilt
                    (scaler.scale(loss) if stepping is optimizer else loss).backward()
                    if clip is not None:
                        if stepping is optimizer:
                            scaler.unscale_(optimizer)
                        clip_grad_norm_(net.parameters(), clip)
                    before = values(net)
                    if stepping is optimizer:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        stepping.step()
                    assert stepping.skipped == (step == bad)
                    if step == bad:
                        assert_replicas([before, values(net)])
            residuals = [saved(one)["oktopk"]["residuals"] for one in (optimizer, other)]
            found = common(model, optimizer)
        torch.testing.assert_close(values(model), values(plain), rtol=1e-4, atol=1e-6)
        assert all(torch.allclose(residuals[0][name], part, atol=1e-6) for name, part in residuals[1].items())
        return found, float(scaler.get_scale())

    ranks = on_ranks(2, job)
    assert_replicas(model for model, _ in ranks)
    assert [scale for _, scale in ranks] == [128.0, 128.0]
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "skipped" in record.msg]
    assert [level for level, _ in said] == ["INFO", "WARNING"]  # a back-off is routine, and short
    assert said[0][1] == "oktopk: step 3 skipped: the GradScaler's scale of 256 is too large"


def test_a_scaler_that_it_does_not_know_is_an_error_and_a_disabled_one_is_none() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with wrap_local(model, None) as optimizer:
        scaler.scale(loss_of(model, 0, 0)).backward()
        with pytest.raises(RuntimeError, match=r"pass LocalOptimizer\(grad_scaler=…\)"):
            scaler.step(optimizer)
    model = make_model()
    with wrap_local(model, None, grad_scaler=scaler) as optimizer:
        scaler.scale(loss_of(model, 0, 0)).backward()
        with pytest.raises(RuntimeError, match=r"call scaler.step\(optimizer\), not optimizer.step\(\)"):
            optimizer.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    with wrap_local(model, None, grad_scaler=off) as optimizer:
        optimizer.zero_grad()
        off.scale(loss_of(model, 0, 0)).backward()
        off.step(optimizer)
        off.update()
        assert not optimizer.skipped


# Checkpoints.


@pytest.mark.parametrize("algorithm", ["dense", *SPARSE])
def test_a_resumed_run_gives_the_same_bits(algorithm: str) -> None:
    """Moments differ from rank to rank: each loads its own."""
    options: dict[str, Any] = {"algorithm": algorithm, "values": "fp16", "average_state_every": 3}

    def job(comm: oktopk.Communicator) -> Tensor:
        whole = make_model()
        with wrap_local(whole, comm, **options) as optimizer:
            train(whole, optimizer, comm.rank, range(7))
            end = saved(optimizer)
        first = make_model()
        with wrap_local(first, comm, **options) as optimizer:
            train(first, optimizer, comm.rank, range(4))
            model, state = common(first, optimizer), saved(optimizer)
        second = make_model(seed=5)
        second.load_state_dict(model)
        with wrap_local(second, comm, **options) as optimizer:
            optimizer.load_state_dict(state)
            optimizer.localize()
            assert optimizer.param_groups is optimizer.inner.param_groups
            train(second, optimizer, comm.rank, range(4, 7))
            assert_replicas([values(whole), common(second, optimizer)])  # one that is closed has the common ones
            resumed = saved(optimizer)
        assert resumed["param_groups"] == end["param_groups"]
        torch.testing.assert_close(resumed["state"], end["state"], rtol=0, atol=0)
        for name, kept in end["oktopk"]["residuals"].items():
            assert torch.equal(resumed["oktopk"]["residuals"][name], kept)
        return end["state"][0]["exp_avg"]

    moments = on_ranks(3, job)
    assert not torch.equal(moments[0], moments[1])


def states_of(world: int, make: MakeOptimizer = adamw) -> list[dict[str, Any]]:
    def job(comm: oktopk.Communicator) -> dict[str, Any]:
        model = make_model()
        with wrap_local(model, comm, make) as optimizer:
            train(model, optimizer, comm.rank, range(5))
            return saved(optimizer)

    return on_ranks(world, job)


def residuals_of(state: dict[str, Any]) -> Tensor:
    kept = state["oktopk"]["residuals"]
    return torch.cat([kept[name].double().flatten() for name in sorted(kept)])


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
def test_another_number_of_ranks_shares_residuals_and_averages_moments(before: int, after: int) -> None:
    states = states_of(before)
    shared = [oktopk.redistribute(iter(reversed(states)), rank, after) for rank in range(after)]
    old = torch.stack([residuals_of(state) for state in states]).sum(0) / before
    new = torch.stack([residuals_of(state) for state in shared]).sum(0) / after
    assert bool(old.any())
    torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-7)
    for state in shared:
        assert state["param_groups"] == states[0]["param_groups"]
        for index, moments in state["state"].items():
            for key, value in moments.items():
                expected = torch.stack([one["state"][index][key].double() for one in states]).mean(0)
                torch.testing.assert_close(value.double(), expected)
                assert value.dtype == states[0]["state"][index][key].dtype

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        model = make_model()
        with wrap_local(model, comm) as optimizer:
            optimizer.load_state_dict(through_a_file(shared[comm.rank]))
            train(model, optimizer, comm.rank, range(5, 8))
            assert optimizer.stats()["step"] == 8
            return common(model, optimizer)

    assert_replicas(on_ranks(after, job))


def test_states_that_do_not_belong_together_are_refused() -> None:
    one, two = states_of(2)
    with pytest.raises(ValueError, match="1 of them have no state of an optimizer"):
        oktopk.redistribute([one, two["oktopk"]], 0, 1)
    with pytest.raises(ValueError, match=r"not the state_dict of an optimizer: rank 1 has no 'state'"):
        oktopk.redistribute([one, {"oktopk": two["oktopk"]}], 0, 1)
    two["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match="other shapes of exp_avg"):
        oktopk.redistribute([one, two], 0, 1)


def test_residuals_of_gradients_and_of_updates_are_not_mixed_up() -> None:
    model = make_model()
    with wrap(model, None, adamw) as gradients, wrap_local(model, None) as updates:
        for one, other, said in (
            (gradients, updates, "residuals of this state are gradients, this run averages updates"),
            (updates, gradients, "residuals of this state are updates, this run averages gradients"),
        ):
            with pytest.raises(ValueError, match=f"{said}: load only the model"):
                other.load_state_dict(one.state_dict())
        plain = adamw(make_model().parameters())
        updates.load_state_dict(plain.state_dict())  # residuals start at zero


# Moments.


def test_moments_are_averaged_every_so_many_steps() -> None:
    def job(comm: oktopk.Communicator) -> list[Tensor]:
        model = make_model()
        found = []
        with wrap_local(model, comm, average_state_every=2, averaged_state=["exp_avg_sq"]) as optimizer:
            for step in range(4):
                train(model, optimizer, comm.rank, [step])
                state = [optimizer.state[p] for p in model.parameters()]
                found.append(torch.cat([one["exp_avg_sq"].flatten() for one in state]))
                assert step == 0 or not torch.equal(state[0]["exp_avg"], found[0][:96].view(16, 6))
        return found

    first, second, third = on_ranks(3, job)
    for step in range(4):
        together = torch.equal(first[step], second[step]) and torch.equal(first[step], third[step])
        assert together == (step % 2 == 1)


def test_averaged_moments_are_the_mean_of_those_of_all_ranks() -> None:
    def job(comm: oktopk.Communicator) -> tuple[Tensor, Tensor]:
        moments = []
        for every in (None, 1):
            model = make_model()
            with wrap_local(model, comm, average_state_every=every) as optimizer:
                train(model, optimizer, comm.rank, [0])
                moments.append(optimizer.state[model[0].weight]["exp_avg_sq"].clone())
        return moments[0], moments[1]

    ranks = on_ranks(2, job)
    mean = torch.stack([local for local, _ in ranks]).mean(0)
    for _, averaged in ranks:
        torch.testing.assert_close(averaged, mean)


def test_state_that_is_not_there_cannot_be_averaged() -> None:
    def job(comm: oktopk.Communicator) -> str:
        model = make_model()
        with wrap_local(model, comm, momentum_sgd, average_state_every=1) as optimizer:
            before = values(model)
            said = error_of(lambda: train(model, optimizer, comm.rank, [0]))
            assert_replicas([before, values(model)])
            return said

    with pytest.raises(ValueError, match="SGD has no 'exp_avg_sq'; choose from momentum_buffer"):
        on_ranks(2, lambda comm: _fail_with(job(comm)))


def _fail_with(said: str) -> None:
    raise ValueError(said)


def test_a_warm_up_by_total_steps_is_a_share_of_the_exchanges() -> None:
    with oktopk.LocalOptimizer(
        adamw((model := make_model()).parameters()), model=model, sync_every=30, total_steps=1000
    ) as optimizer:
        assert optimizer._engine.settings.total_steps == 34


# What is refused, on all ranks.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum": 0.9}, "LocalOptimizer has no momentum: .* leave it out"),
        ({"norm_clip": 1.0}, r"LocalOptimizer has no norm_clip: call clip_grad_norm_\("),
        ({"backward_passes": 2}, "LocalOptimizer has no backward_passes: gradients accumulate"),
        ({"sync_every": 0}, "sync_every must be an integer of at least 1, got 0"),
        ({"total_steps": True}, "total_steps must be an integer of at least 1, got True"),
        ({"average_state_every": True}, "average_state_every must be an integer of at least 1, got True"),
        ({"averaged_state": "exp_avg_sq"}, r"averaged_state must be names such as \['exp_avg_sq'\]"),
        ({"lr_scale": 0.0}, "lr_scale must be None or a number above 0, got 0.0"),
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"valeus": "fp16"}, "unknown option 'valeus': did you mean 'values'"),
    ],
)
def test_what_is_wrong_on_one_rank_is_refused_on_all(options: dict[str, Any], said: str) -> None:
    def job(comm: oktopk.Communicator) -> None:
        with pytest.raises((ValueError, TypeError), match=said):
            wrap_local(make_model(), comm, **(options if comm.rank == 1 else {}))

    on_ranks(2, job)


def test_ranks_must_mean_the_same() -> None:
    def job(comm: oktopk.Communicator) -> None:
        for options in ({"sync_every": comm.rank + 1}, {"average_state_every": comm.rank + 1}):
            (name,) = options
            with pytest.raises(ValueError, match=f"ranks disagree on {name}"):
                wrap_local(make_model(), comm, **options)

    on_ranks(2, job)


def test_what_it_cannot_wrap_is_an_error() -> None:
    model = make_model()
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got Sequential"):
        oktopk.LocalOptimizer(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LBFGS .* use oktopk.DistributedOptimizer"):
        oktopk.LocalOptimizer(torch.optim.LBFGS(model.parameters()))
    with wrap_local(model, None, norm_clip=None, momentum=0.0) as optimizer:  # as good as nothing
        assert optimizer.sync_every == 1


def test_decay_that_differs_between_ranks_is_an_error_before_they_drift_apart() -> None:
    def job(comm: oktopk.Communicator) -> None:
        model = make_model()
        with wrap_local(model, comm) as optimizer:
            train(model, optimizer, comm.rank, range(2))
            before = values(model)
            optimizer.param_groups[0]["lr"] *= 1 + comm.rank
            said = error_of(lambda: train(model, optimizer, comm.rank, [2]))
            assert said.startswith("ranks disagree on learning rate and weight decay")
            assert_replicas([before, values(model)])
            raise ValueError(said)

    with pytest.raises(ValueError, match="ranks disagree on learning rate and weight decay"):
        on_ranks(2, job)


# DDP models.


def with_ddp(connect: Callable[..., Any], synced: bool) -> Any:
    net = DDP(mlp())
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    with oktopk.LocalOptimizer(inner, model=net, density=0.05, warmup_steps=1, auto=False) as optimizer:
        assert "0.weight" in optimizer._named  # the names of the model, with or without DDP
        for step in range(4):
            optimizer.zero_grad()
            if synced and step == 2:
                backward(net, dist.get_rank(), step)
            else:
                with net.no_sync():
                    backward(net, dist.get_rank(), step)
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
        optimizer.synchronize()
        return parameters_of(net)


def test_a_ddp_model_under_no_sync_trains_and_its_averaged_gradients_are_refused() -> None:
    first, second = worlds.run("gloo", 2, with_ddp, False)
    assert same_bits(first, second)
    for said in worlds.run("gloo", 2, with_ddp, True):
        assert "run forward and backward under model.no_sync()" in said


# What the other front ends say about adaptive optimizers.


@pytest.fixture
def unsaid() -> Iterable[None]:
    base._say_adaptive.cache_clear()
    yield
    base._say_adaptive.cache_clear()


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta]
)
def test_sparse_gradients_of_an_adaptive_optimizer_are_advised_against_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def job(comm: oktopk.Communicator) -> None:
        for _ in range(2):
            wrap(make_model(), comm, make).close()

    with caplog.at_level(logging.WARNING, "oktopk"):
        on_ranks(2, job)
    (record,) = caplog.records
    assert make.__name__ in record.getMessage()
    assert "oktopk.LocalOptimizer" in record.getMessage()


@pytest.mark.usefixtures("unsaid")
def test_nothing_is_said_where_it_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oktopk"):
        wrap(make_model(), None, momentum_sgd).close()
        wrap(make_model(), None, adamw, algorithm="dense").close()
        wrap(make_model(), None, adamw, density=1.0).close()
        wrap_local(make_model(), None).close()
    assert caplog.records == []


def guarded(connect: Callable[..., Any]) -> list[str]:
    base._say_adaptive.cache_clear()
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oktopk").addHandler(handler)
    net = DDP(mlp())
    inner = torch.optim.Adam(net.parameters())
    with oktopk.OkTopkState(density=0.05).register(net, inner) as state:
        state.guard(inner)
    return [text for text in found if "adaptive" in text]


def test_the_ddp_hook_advises_on_rank_0_only() -> None:
    first, second = worlds.run("gloo", 2, guarded)
    assert [len(first), len(second)] == [1, 0]
    assert "such as Adam:" in first[0]
