"""A run that goes on from a checkpoint, through the hook, has the bits of one that was never interrupted."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oktopk
from tests.support import worlds
from tests.support.training import (
    DDP,
    Parameters,
    backward,
    deep,
    error_of,
    hook_up,
    mlp,
    parameters_of,
    same_bits,
    sgd,
    train,
)

HALF, STEPS = 10, 20
CASES = {
    "sparse before and after": {"warmup_steps": 5},
    "sparse from the start": {"warmup_steps": 0},
    "warm-up ends later": {"warmup_steps": 15},
    "momentum correction": {"warmup_steps": 5, "momentum": 0.9},
    "momentum correction, warm-up ends later": {"warmup_steps": 15, "momentum": 0.9},
    "one bucket of the whole model": {"warmup_steps": 5, "buckets": "model"},
}
Snapshot = dict[str, Any]


def start(named: bool, make: Callable[[], nn.Module] = mlp, **options: Any) -> tuple[DDP, Any, oktopk.OkTopkState]:
    net = DDP(make(), bucket_cap_mb=0.001)
    optimizer = sgd(net, momentum=0.0 if options.get("momentum") else 0.9)
    return net, optimizer, hook_up(net, optimizer, named, **options)


def through_a_file(snapshot: Snapshot) -> Snapshot:
    file = io.BytesIO()
    torch.save(snapshot, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def save(net: DDP, optimizer: torch.optim.Optimizer, state: oktopk.OkTopkState) -> Snapshot:
    return through_a_file(
        {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "oktopk": state.state_dict()}
    )


def load(snapshot: Snapshot, net: DDP, optimizer: torch.optim.Optimizer, state: oktopk.OkTopkState) -> None:
    net.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    state.load_state_dict(snapshot["oktopk"])


def resume(named: bool, **options: Any) -> tuple[Snapshot, Parameters, Parameters]:
    net, optimizer, state = start(named, **options)
    train(net, optimizer, range(HALF))
    saved = save(net, optimizer, state)
    train(net, optimizer, range(HALF, STEPS))
    fresh, its_optimizer, its_state = start(named, **options)
    load(saved, fresh, its_optimizer, its_state)
    train(fresh, its_optimizer, range(HALF, STEPS))
    with state, its_state:
        return saved["oktopk"], everything(net, state), everything(fresh, its_state)


def everything(net: DDP, state: oktopk.OkTopkState) -> Parameters:
    """Parameters, residuals and velocities."""
    kept = state.state_dict()
    assert kept["step"] == STEPS
    memories = {f"{kind} of {name}": x for kind in ("residuals", "velocities") for name, x in kept[kind].items()}
    return parameters_of(net) | memories


def resume_both(connect: Callable[..., Any], case: str) -> dict[bool, tuple[Snapshot, Parameters, Parameters]]:
    return {named: resume(named, **CASES[case]) for named in (True, False)}


@pytest.mark.parametrize("case", CASES)
def test_resuming_changes_no_bit(case: str) -> None:
    """With and without names."""
    for rank in worlds.run("gloo", 3, resume_both, case):
        for named, (saved, uninterrupted, resumed) in rank.items():
            assert (len(saved["buckets"]) > 1) == ("buckets" not in CASES[case])
            assert bool(saved["residuals"]) == (CASES[case]["warmup_steps"] < HALF)
            assert bool(saved["velocities"]) == ("momentum" in CASES[case])
            assert all(name.startswith("#") != named for entry in saved["buckets"] for name in entry["names"])
            assert same_bits(resumed, uninterrupted), f"named: {named}"


# Checkpoints that do not fit.


def after_two_steps(named: bool, make: Callable[[], nn.Module] = mlp) -> dict[str, Any]:
    net, optimizer, state = start(named, make)
    train(net, optimizer, range(2))
    with state:
        return state.state_dict()


def of_another_model(named: bool) -> str:
    saved = after_two_steps(named, lambda: deep(3))
    net, _, state = start(named)

    def use() -> None:
        state.load_state_dict(saved)
        backward(net, dist.get_rank(), 0)

    return error_of(use)


def of_another_rank() -> tuple[str, dict[str, Any]]:
    """The message, and what the state is afterwards."""
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, after_two_steps(True))
    _, _, state = start(True)
    message = error_of(lambda: state.load_state_dict(saved[dist.get_rank() - 1]))
    return message, state.state_dict()


def of_another_frozen_layer() -> str:
    model = mlp()
    model[0].requires_grad_(False)
    with hook_up(DDP(model)) as state:
        saved = state.state_dict() | {"residuals": {"0.weight": torch.ones(7)}}
        return error_of(lambda: state.load_state_dict(saved))


def of_another_world() -> tuple[str, int]:
    """Each rank trains alone at first; the message, and the step after doing what it says."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [dist.new_group([r]) for r in range(world)][rank]
    alone = DDP(mlp(), process_group=own, bucket_cap_mb=0.001)
    with hook_up(alone, process_group=own) as state:
        train(alone, sgd(alone), range(2))
        saved = state.state_dict()
    net, optimizer, state = start(True)
    message = error_of(lambda: state.load_state_dict(saved))
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, saved)
    state.load_state_dict(oktopk.redistribute(everybody[:1], rank, world))
    train(net, optimizer, [2])
    return message, state.step


def refused(connect: Callable[..., Any]) -> dict[str, Any]:
    return {
        "named": of_another_model(True),
        "unnamed": of_another_model(False),
        "rank": of_another_rank(),
        "frozen": of_another_frozen_layer(),
        "world": of_another_world(),
    }


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, Any]]:
    return worlds.run("gloo", 2, refused)


def test_a_checkpoint_of_another_model_names_parameters(refusals: list[dict[str, Any]]) -> None:
    for heard in refusals:
        assert "checkpoint does not match the model: " in heard["named"]
        assert "only in the checkpoint: 2.0.bias, 2.0.weight" in heard["named"]
        assert "only in the model: 0.weight, 0.bias" in heard["named"]
        assert "checkpoint does not match the model: " in heard["unnamed"]
        assert "size mismatch: #5, #4" in heard["unnamed"]


def test_a_checkpoint_of_another_rank_says_what_to_do(refusals: list[dict[str, Any]]) -> None:
    for rank, heard in enumerate(refusals):
        message, state = heard["rank"]
        assert f"this is the state of rank {1 - rank}, loaded on rank {rank}" in message
        assert "every rank must save and load its own" in message
        assert state["step"] == 0
        assert state["residuals"] == {}


def test_a_checkpoint_of_another_frozen_layer_is_refused(refusals: list[dict[str, Any]]) -> None:
    for heard in refusals:
        assert "residuals of 0.weight have 7 entries, the parameter 800" in heard["frozen"]


def test_a_checkpoint_of_another_world_says_what_to_do(refusals: list[dict[str, Any]]) -> None:
    for heard in refusals:
        message, step = heard["world"]
        assert "saved by 1 ranks, now there are 2" in message
        assert "load oktopk.redistribute(states, rank, world)" in message
        assert step == 3, "and that works"
