"""FsdpState on 2 x 2, 4 x 1 and 1 x 4 ranks: the laws of averaging between replicas, and what it refuses."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.metrics.sinks import MemorySink
from tests.support import worlds
from tests.support.hsdp import (
    backward,
    furthest,
    grads,
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

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BF16_REDUCED = MixedPrecisionPolicy(torch.bfloat16)
FP16 = MixedPrecisionPolicy(torch.float16)


def state(mesh: Any, **options: Any) -> oktopk.FsdpState:
    return oktopk.FsdpState(
        mesh, **({"warmup_steps": 0, "auto": False, "timeout": 60, "values": "fp32"} | options)
    )


def averaged(
    mesh: Any, warmup_steps: int = 0, setup: Callable[[nn.Module], None] | None = None,
    shard: Callable[..., Any] = shard, **fsdp: Any,
) -> Any:  # fmt: skip
    """The gradients of one step at density 1, and those of FSDP alone: native HSDP if there are replicas."""
    native, net = shard(make_net(), mesh, **fsdp), shard(make_net(), mesh["shard"], **fsdp)
    for model in (native, net):
        if setup is not None:
            setup(model)
    backward(native)
    with state(mesh, density=1.0, warmup_steps=warmup_steps).register(net):
        backward(net)
        return grads(net), grads(native)


# Density 1 is dense.


def equals_native() -> dict[str, Any]:
    square, tall, wide = make_mesh(2, 2), make_mesh(4, 1), make_mesh(1, 4)
    mine, theirs = averaged(tall)
    gradients = shard(make_net(), tall["shard"])
    backward(gradients)
    scale = sum_over(tall, "replicate", {name: grad.abs() for name, grad in grads(gradients).items()})
    return {
        "sparse": same(*averaged(square)),
        "dense": same(*averaged(square, warmup_steps=5)),
        "1 x 4": same(*averaged(wide)),
        "4 x 1": all(bool(((mine[n] - theirs[n]).abs() <= 2**-23 * scale[n]).all()) for n in mine),
        "bf16 compute": same(*averaged(square, mp_policy=BF16)),
        "bf16 reduce": furthest(*averaged(square, mp_policy=BF16_REDUCED)),
        "fp16": furthest(*averaged(square, mp_policy=FP16)),
        "offload": same(*averaged(square, offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "sums": furthest(*averaged(square, setup=sum_gradients)),
        "sums of a unit": furthest(*averaged(square, setup=lambda net: sum_gradients(net.blocks[1]))),
        "lists of modules": same(*averaged(square, shard=shard_lists)),
    }


def shard_lists(net: Any, mesh: Any) -> Any:
    for block in net.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    torch.distributed.fsdp.fully_shard([net.emb, net.head], mesh=mesh)
    return torch.distributed.fsdp.fully_shard(net, mesh=mesh)


def sum_gradients(model: nn.Module) -> None:
    """As torchtitan does it, which divides the loss by the number of tokens instead."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


# Sparse steps.


def conserves() -> dict[str, Any]:
    """Σ gradients = R · Σ applied + Σ residuals over replicas, entry by entry; a twin has the gradients."""
    mesh = make_mesh(2, 2)
    net, twin, sink = shard(make_net(), mesh["shard"]), shard(make_net(), mesh["shard"]), MemorySink()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    with state(mesh, density=0.01, sinks=[sink]).register(net, optimizer) as averaging:
        kept: dict[str, Tensor] = {}
        for step in range(50):
            with torch.no_grad():
                for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
                    local(mine).copy_(local(theirs))
            optimizer.zero_grad()
            twin.zero_grad()
            backward(net, step)
            backward(twin, step)
            given = sum_over(mesh, "replicate", grads(twin))
            for name, mean in grads(net).items():
                kept[name] = kept.get(name, 0) + given[name] - 2 * mean.double()
            optimizer.step()
        residuals = {name: r[0] for name, r in map_local(averaging.state_dict()["residuals"]).items()}
        held = sum_over(mesh, "replicate", residuals)
        return {
            "mass": max(float((kept[name] - held[name]).abs().max()) for name in kept if kept[name].numel()),
            "equal": replicas_equal(mesh, net),
            "sparse": all(event.phase == "sparse" for event in sink.steps),
            "sizes": {event.volume.size for event in sink.steps} == {sum(p.numel() for p in parts(net).values())},
            "few": max(event.local_density for event in sink.steps),
        }


def map_local(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor).clone() for name, tensor in tensors.items()}


def accumulates() -> dict[str, Any]:
    """Two micro-batches: one exchange, by either way to leave out the first."""
    mesh, found = make_mesh(2, 2), {}
    plain = shard(make_net(), mesh["shard"])
    for step in range(2):
        backward(plain, step)
    wanted = {name: total / 2 for name, total in sum_over(mesh, "replicate", grads(plain)).items()}
    for way in ("no_sync", "set_requires_gradient_sync"):
        net = shard(make_net(), mesh["shard"])
        with state(mesh, density=1.0).register(net) as averaging:
            net.set_requires_gradient_sync(way == "no_sync")
            with averaging.no_sync() if way == "no_sync" else contextlib.nullcontext():
                backward(net, 0)
            net.set_requires_gradient_sync(True)
            backward(net, 1)
            found[way] = averaging.step, furthest(grads(net), wanted)
    return found


def skips() -> dict[str, Any]:
    """A NaN in one row of one rank: all ranks skip; what is not poisoned stays in the residuals."""
    mesh, found = make_mesh(2, 2), {}
    net, twin = shard(make_net(), mesh["shard"]), shard(make_net(), mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    for warmup_steps in (0, 10):
        with state(mesh, density=0.1, warmup_steps=warmup_steps).register(net, optimizer) as averaging:
            for step in range(2):
                optimizer.zero_grad()
                backward(net, step)
                optimizer.step()
            before, residuals = parts(net), map_local(averaging.state_dict()["residuals"])
            with torch.no_grad():
                for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
                    local(mine).copy_(local(theirs))
            twin.zero_grad()
            backward(twin, 2)
            optimizer.zero_grad()
            end = poison(net, rank=1)
            backward(net, 2)
            end()
            zero = not any(bool(grad.any()) for grad in grads(net).values())
            optimizer.step()
            after, given = map_local(averaging.state_dict()["residuals"]), grads(twin)
            kept = [
                torch.equal(after[n], residuals[n])
                or torch.allclose(after[n][0], residuals[n][0] + given[n], atol=1e-6)
                for n in after
            ]
            whole = [
                float((after[n][0] - residuals[n][0] - given[n]).abs().max()) <= 1e-6
                for n in after
                if given[n].numel()
            ]
            skipped, culprits = averaging.skipped, averaging.last.culprits
            unchanged = same(before, parts(net))
            optimizer.zero_grad()
            backward(net, 3)
            optimizer.step()
            found[warmup_steps] = {
                "skipped": skipped, "culprits": culprits, "zero": zero, "kept": all(kept), "whole": all(whole),
                "unchanged": unchanged,
                "goes on": not same(before, parts(net)) and replicas_equal(mesh, net) and not averaging.skipped,
            }  # fmt: skip
            found[warmup_steps]["mass"] = warmup_steps > 0 or all(kept)
    return found


def leaves_out_a_unit() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    with state(mesh, density=0.1).register(net, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            backward(net, step, blocks=1 if mesh.get_local_rank("replicate") == step % 2 else None)
            there = len(grads(net))
            optimizer.step()
        return {"there": there, "equal": replicas_equal(mesh, net)}


def starts_as_replica_0() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(seed=mesh.get_local_rank("replicate")), mesh["shard"])
    net.register_buffer("statistics", torch.full((2,), float(mesh.get_local_rank("replicate"))))
    first = shard(make_net(seed=0), mesh["shard"])
    with state(mesh).register(net):
        return {"same": same(parts(net), parts(first)), "buffer": net.statistics.tolist()}


# Norms and decisions of the whole mesh.


def clips() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    native = shard(make_net(), mesh)
    plain = shard(make_net(), mesh["shard"])
    backward(native)
    backward(plain)
    norms = sum_over(mesh, "shard", {"norm": sum(grad.double().square().sum() for grad in grads(plain).values())})
    norm = float(norms["norm"].sqrt())
    clip = 0.9 * norm if mesh.get_local_rank("replicate") else 0.0
    limit = torch.tensor([clip])
    dist.all_reduce(limit, dist.ReduceOp.MAX)  # below the norm of replica 1
    factor = min(1.0, float(limit) / norm)
    wanted = sum_over(mesh, "replicate", {name: factor * grad / 2 for name, grad in grads(plain).items()})
    net, after = shard(make_net(), mesh["shard"]), shard(make_net(), mesh["shard"])
    with state(mesh, density=1.0, norm_clip=float(limit)).register(net):
        backward(net)
    with state(mesh, density=1.0).register(after):
        backward(after)
        total = [nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor() for model in (after, native)]
    return {
        "factor": factor,
        "before": furthest(grads(net), {name: mean.float() for name, mean in wanted.items()}),
        "after": [float(norm) for norm in total],
        "clipped": same(grads(after), grads(native)),
    }


def decides_together() -> dict[str, Any]:
    """Ranks of one shard are slower than others: without an agreement, they would decide otherwise."""
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    with state(mesh, density="auto", auto=True, warmup_steps=2).register(net) as averaging:
        for step in range(24):
            net.zero_grad()
            backward(net, step)
        figures = averaging.stats()
        return {
            "schedule": averaging.schedule,
            "density": figures["chosen_density"],
            "budget": figures["budget_seconds"],
        }


def decides_dense_or_sparse() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    with state(mesh, density=0.1, auto=True, warmup_steps=2).register(net) as averaging:
        for step in range(12):
            net.zero_grad()
            backward(net, step)
        figures = averaging.stats()
        return {name: figures[name] for name in ("prefers_dense", "dense_step_seconds", "sparse_step_seconds")}


def momentum() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with state(mesh, density=0.1, momentum=0.9, warmup_steps=2).register(net, optimizer):
        losses = []
        for step in range(20):
            optimizer.zero_grad()
            losses.append(backward(net, step % 2))
            optimizer.step()
        return {"equal": replicas_equal(mesh, net), "falls": losses[-1] < losses[1]}


# What goes wrong.


def continues_after_a_failed_pass() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    optimizer, failing = torch.optim.SGD(net.parameters(), 0.05), [False]

    def fail(grad: Tensor) -> Tensor:
        if failing[0]:
            raise RuntimeError("in the middle of backward")
        return grad

    net.blocks[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with state(mesh, density=0.1).register(net, optimizer) as averaging:
        for step in range(4):
            optimizer.zero_grad()
            failing[0] = step == 1
            with pytest.raises(RuntimeError, match="in the middle") if failing[0] else contextlib.nullcontext():
                backward(net, step)
            if failing[0]:
                net.reset_iter_state()  # as FSDP asks for
            else:
                optimizer.step()
        return {"steps": averaging.step, "equal": replicas_equal(mesh, net)}


def freezes() -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    net = make_net()
    net.blocks[0].a.requires_grad_(False)
    net = shard(net, mesh["shard"])
    with state(mesh, density=0.1).register(net) as averaging:
        found = []
        for step in range(3):
            net.zero_grad()
            backward(net, step)
            found.append(len(grads(net)))
            net.blocks[0].a.requires_grad_(step == 0)  # unfrozen, and frozen again
        return {"grads": found, "steps": averaging.step}


def refuses() -> dict[str, str]:
    mesh, found = make_mesh(2, 2), {}

    def register(what: str, net: Any, **options: Any) -> None:
        with state(mesh, **options) as averaging:
            try:
                averaging.register(net)
            except (TypeError, ValueError) as error:
                found[what] = str(error)

    with state(mesh).register(scheduled := shard(make_net(), mesh["shard"])):
        try:
            for hook in scheduled.head.weight._post_accumulate_grad_hooks.values():
                hook(scheduled.head.weight)  # as FSDP does when a pipeline schedule ends a step
        except RuntimeError as error:
            found["pipeline"] = str(error)
    stepping = shard(make_net(), mesh["shard"])
    stepping.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    half = make_net()
    for block in half.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh["shard"])
    register("native", shard(make_net(), mesh))
    register("DDP", DistributedDataParallel(make_net()))
    register("plain", make_net())
    register("half", half)
    register("optimizer in backward", stepping)
    register("FSDP1", torch.distributed.fsdp.FullyShardedDataParallel(make_net(), device_id=torch.device("cpu")))
    from torch.distributed._composable.replicate_with_fsdp import replicate

    register("replicate", replicate(make_net(), mesh=mesh["replicate"]))
    one_rank = make_net() if dist.get_rank() else shard(make_net(), mesh["shard"])
    register("one rank", one_rank)
    for what, make in {
        "mesh": lambda: oktopk.FsdpState(mesh["shard"]),
        "group": lambda: oktopk.FsdpState(None),
        "ranks_per_host": lambda: state(mesh, ranks_per_host=2),
        "settings": lambda: state(mesh, density=0.1 * (1 + dist.get_rank())),
    }.items():
        try:
            make()
        except (TypeError, ValueError) as error:
            found[what] = str(error)
    return found


SCENES = (
    equals_native, conserves, accumulates, skips, leaves_out_a_unit, starts_as_replica_0, clips, decides_together,
    decides_dense_or_sparse, momentum, continues_after_a_failed_pass, freezes, refuses,
)  # fmt: skip


def play(connect: Callable[..., Any]) -> dict[str, Any]:
    return {scene.__name__: scene() for scene in SCENES}


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return worlds.run("gloo", 4, play, timeout=400)


pytestmark = pytest.mark.timeout(420)


def test_density_1_is_native_hsdp_to_the_bit(played: list[dict[str, Any]]) -> None:
    for rank in played:
        found = rank["equals_native"]
        assert found["sparse"]
        assert found["dense"]
        assert found["offload"]
        assert found["bf16 compute"]
        assert found["1 x 4"], "one replica is plain FSDP"
        assert found["4 x 1"], "other orders of sums stay within their rounding"
        assert found["bf16 reduce"] < 1e-3
        assert found["fp16"] < 1e-3
        assert found["sums"] < 1e-6, "with a divide factor of the user's, gradients are sums"
        assert found["sums of a unit"] < 1e-6, "which others need not have"
        assert found["lists of modules"], "a unit may be a list of modules"


def test_mass_is_conserved_and_replicas_stay_the_same(played: list[dict[str, Any]]) -> None:
    for rank in played:
        found = rank["conserves"]
        assert found["mass"] < 1e-4
        assert found["equal"]
        assert found["sparse"]
        assert found["sizes"], "padding is no entry"
        assert found["few"] < 0.03


def test_micro_batches_are_exchanged_once(played: list[dict[str, Any]]) -> None:
    for rank in played:
        for steps, difference in rank["accumulates"].values():
            assert steps == 1
            assert difference < 1e-6


def test_a_nan_in_one_shard_skips_the_step_on_all_ranks(played: list[dict[str, Any]]) -> None:
    for rank in played:
        for phase in rank["skips"].values():
            assert phase["skipped"]
            assert phase["zero"]
            assert phase["unchanged"]
            assert phase["goes on"]
            assert phase["mass"]
    assert all(rank["skips"][0]["culprits"] == ("rank 0: emb.weight",) for rank in played)
    whole = [rank["skips"][0]["whole"] for rank in played]
    assert whole == [False, True, False, True], "shards without a NaN keep all of their gradient"


def test_replicas_that_leave_out_a_unit_stay_the_same(played: list[dict[str, Any]]) -> None:
    assert all(rank["leaves_out_a_unit"] == {"there": 12, "equal": True} for rank in played)


def test_replicas_start_as_replica_0(played: list[dict[str, Any]]) -> None:
    assert all(rank["starts_as_replica_0"] == {"same": True, "buffer": [0.0, 0.0]} for rank in played)


def test_norms_are_those_of_all_shards(played: list[dict[str, Any]]) -> None:
    for rank in played:
        found = rank["clips"]
        assert found["before"] < 1e-6
        assert found["after"][0] == found["after"][1]
        assert found["clipped"]
    assert any(rank["clips"]["factor"] < 1 for rank in played)


def test_all_ranks_decide_alike(played: list[dict[str, Any]]) -> None:
    for scene in ("decides_together", "decides_dense_or_sparse"):
        assert all(rank[scene] == played[0][scene] for rank in played)


def test_momentum_correction_works_on_shards(played: list[dict[str, Any]]) -> None:
    assert all(rank["momentum"] == {"equal": True, "falls": True} for rank in played)


def test_a_failed_pass_is_given_up(played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert rank["continues_after_a_failed_pass"] == {"steps": 3, "equal": True}


def test_frozen_parameters_are_left_out(played: list[dict[str, Any]]) -> None:
    assert all(rank["freezes"] == {"grads": [10, 12, 10], "steps": 3} for rank in played)


REFUSED = {
    "native": r"mesh=mesh\['shard'\]",
    "DDP": "oktopk.OkTopkState",
    "plain": r"not sharded: call fully_shard\(…, mesh=mesh\['shard'\]\)",
    "half": "in no FSDP unit",
    "optimizer in backward": "step the optimizer after backward",
    "FSDP1": "FSDP1.* use FSDP2",
    "replicate": r"replicate\(\) averages",
    "one rank": "not sharded",
    "mesh": "replicate= names the first",
    "group": "init_device_mesh",
    "ranks_per_host": "Leave it out",
    "settings": "ranks disagree on density",
    "pipeline": "FsdpState does not work with them",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_remedy_on_every_rank(what: str, played: list[dict[str, Any]]) -> None:
    for rank in played:
        assert re.search(REFUSED[what], rank["refuses"].get(what, "nothing was refused"))
