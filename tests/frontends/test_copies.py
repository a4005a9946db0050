"""Copies of a model with the hook: torch.save, pickle, copy.deepcopy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import oktopk
from oktopk.comm import group
from tests.support import worlds
from tests.support.stepping import assert_same_state, same_bits
from tests.support.training import DDP, Parameters, backward, hook_up, mlp, parameters_of, sgd
from tests.support.wrapping import make_model, train, wrap


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return "no error"


def steps(net: DDP, optimizer: torch.optim.Optimizer, which: range) -> None:
    for step in which:
        optimizer.zero_grad()
        backward(net, dist.get_rank(), step)
        optimizer.step()


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "a copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


def copied(connect: Callable[..., Any]) -> dict[str, tuple[bool, Parameters, Parameters]]:
    """A copy in the middle of training, which then goes on beside the original."""
    outcomes = {}
    for way, make in WAYS.items():
        net = DDP(mlp(), bucket_cap_mb=0.001)
        with hook_up(net, optimizer := sgd(net), warmup_steps=1) as state:
            steps(net, optimizer, range(4))
            connected = sum(group._made.values())
            twin, momentum = make(net), copy.deepcopy(optimizer.state_dict())
            found: oktopk.OkTopkState = twin._comm_hooks[0][1]
            assert found is not state
            assert_same_state(found.state_dict(), state.state_dict())
            assert (found.step, repr(found)) == (4, "OkTopkState(a copy at step 4)")
            assert (found.last, found.skipped, found.stats()) == (None, False, {})
            steps(net, optimizer, range(4, 8))
            quiet = sum(group._made.values()) == connected
        with found.register(twin, other := sgd(twin)):
            other.load_state_dict(momentum)
            steps(twin, other, range(4, 8))
        outcomes[way] = quiet, parameters_of(net), parameters_of(twin)
    return outcomes


def test_a_copy_goes_on_where_it_was_taken() -> None:
    """To the bit, residuals and thresholds included. It opens no connection before it is used."""
    for found in worlds.run("gloo", 2, copied):
        for way, (quiet, original, twin) in found.items():
            assert quiet, way
            assert same_bits(original, twin), way


def use(state: oktopk.OkTopkState) -> None:
    state.run(lambda comm: None)


def closed_or_refused(connect: Callable[..., Any]) -> tuple[list[Any], str, str, str]:
    """Copies that are not used; of a state with a GradScaler; of another rank's state; with other buckets."""
    net = DDP(mlp())
    power = DDP(mlp())
    power.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    saved(power)  # what users know
    with hook_up(net, sgd(net), grad_scaler=torch.amp.GradScaler("cpu")) as state:
        unused = copy.deepcopy(state)
        unused.close()
        scaled = error_of(lambda: use(unused))
    with hook_up(DDP(mlp())) as state:
        other = [state] * dist.get_world_size()
        dist.all_gather_object(other, state)  # pickles
        wrong = error_of(lambda: use(other[0]))
        for one in other:
            one.close()
        twin = copy.deepcopy(state)
        twin.__setstate__(replace(twin._copied, plan="model" if dist.get_rank() else 25.0))
        plan = error_of(lambda: use(twin))
    return [type(one) for one in other], scaled, wrong, plan


def test_copies_that_cannot_go_on_say_so() -> None:
    for rank, (kinds, scaled, wrong, plan) in enumerate(worlds.run("gloo", 2, closed_or_refused)):
        assert kinds == [oktopk.OkTopkState] * 2
        assert "has no GradScaler: make a new one" in scaled
        assert "this is the state of rank 0, loaded on rank 1" in wrong, rank
        assert "ranks disagree on buckets" in plan


def test_a_model_of_the_wrapper_can_be_copied() -> None:
    model = make_model()
    with wrap(model, None) as optimizer:
        train(model, optimizer, 0, range(3))
        for make in WAYS.values():
            twin = make(model)
            assert same_bits(twin.state_dict(), model.state_dict())
            train(model, optimizer, 0, range(3, 4))
            assert not same_bits(twin.state_dict(), model.state_dict())
