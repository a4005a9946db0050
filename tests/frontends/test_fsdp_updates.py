"""LocalOptimizer over parameters that FSDP2 shards: replicas average the updates of their shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from tests.support import worlds
from tests.support.hsdp import (
    backward,
    furthest,
    local,
    make_mesh,
    make_net,
    parts,
    poison,
    replicas_equal,
    same,
    shard,
    sum_over,
)

pytestmark = pytest.mark.timeout(240)


def wrap(mesh: Any, net: Any, **options: Any) -> oktopk.LocalOptimizer:
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    settings = {"density": 0.05, "warmup_steps": 0, "auto": False, "timeout": 60, "values": "fp32"} | options
    return oktopk.LocalOptimizer(inner, model=net, mesh=mesh, **settings)


def train(optimizer: Any, net: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(backward(net, step))
        optimizer.step()
    return losses


def step_of_density_1(mesh: Any) -> float:
    """θ + the mean over replicas of what AdamW adds on each; decay acts on θ."""
    net, twin = shard(make_net(), mesh["shard"]), shard(make_net(), mesh["shard"])
    start = parts(twin)
    alone = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    backward(twin)
    alone.step()
    mean = sum_over(mesh, "replicate", {name: part / 2 for name, part in parts(twin).items()})
    with wrap(mesh, net, density=1.0, lr_scale=1.0) as optimizer:
        train(optimizer, net, 1)
    assert not same(start, parts(net))
    return furthest(parts(net), {name: part.float() for name, part in mean.items()})


def skip(mesh: Any) -> dict[str, Any]:
    net = shard(make_net(), mesh["shard"])
    with wrap(mesh, net) as optimizer:
        train(optimizer, net, 3)
        before, moments = parts(net), moments_of(optimizer)
        end = poison(net, rank=3)
        train(optimizer, net, 1, 3)
        end()
        skipped, unchanged = optimizer.skipped, same(before, parts(net)) and same(moments, moments_of(optimizer))
        train(optimizer, net, 1, 4)
        return {"skipped": skipped, "unchanged": unchanged, "goes on": not optimizer.skipped}


def moments_of(optimizer: Any) -> dict[str, Tensor]:
    return {str(i): local(s["exp_avg_sq"]).clone() for i, s in enumerate(optimizer.state.values())}


def play(connect: Callable[..., Any]) -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    found: dict[str, Any] = {"density 1": step_of_density_1(mesh), "skip": skip(mesh)}
    net = shard(make_net(seed=mesh.get_local_rank("replicate")), mesh["shard"])
    with wrap(mesh, net, sync_every=2, average_state_every=3) as optimizer:
        found["starts equal"] = replicas_equal(mesh, net)
        found["rank"] = optimizer.rank
        losses = train(optimizer, net, 40)
        found["falls"] = sum(losses[-4:]) < 0.8 * sum(losses[:4])
        optimizer.synchronize()
        found["equal"] = replicas_equal(mesh, net)
    again = shard(make_net(), mesh["shard"])
    for what, make in {
        "native": lambda: wrap(mesh, shard(make_net(), mesh)),
        "comm": lambda: wrap(mesh, again, comm=connect()),
    }.items():
        try:
            make()
        except (TypeError, ValueError) as error:
            found[what] = str(error)
    return found


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return worlds.run("gloo", 4, play, timeout=200)


def test_density_1_applies_the_mean_of_all_replicas_updates(played: list[dict[str, Any]]) -> None:
    assert all(rank["density 1"] < 1e-6 for rank in played)


def test_a_nan_in_one_shard_skips_the_step_on_the_whole_mesh(played: list[dict[str, Any]]) -> None:
    assert all(rank["skip"] == {"skipped": True, "unchanged": True, "goes on": True} for rank in played)


def test_replicas_learn_and_stay_the_same(played: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(played):
        assert rank["rank"] == number
        assert rank["starts equal"]
        assert rank["falls"]
        assert rank["equal"]


def test_refusals_name_the_remedy(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert "mesh=mesh['shard']" in rank["native"]
        assert "leave out comm=" in rank["comm"]
