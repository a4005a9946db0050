"""HSDP on more ranks and longer than in the tests: fp16, tensor parallelism, 200 steps, a killed rank, memory.

python -m stress.hsdp [fp16 tensor-parallel long killed memory]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import oktopk
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
)

from .hsdp_memory import memory

_TIMEOUT, _STEPS, _VICTIM = 20.0, 200, 2


def _state(mesh: Any, **options: Any) -> oktopk.FsdpState:
    return oktopk.FsdpState(
        mesh, **({"warmup_steps": 0, "auto": False, "timeout": 60.0, "values": "fp32"} | options)
    )


def _fp16(connect: Callable[..., Any]) -> float:
    mesh, policy = make_mesh(2, 4), MixedPrecisionPolicy(torch.float16)
    native, net = (shard(make_net(), part, mp_policy=policy) for part in (mesh, mesh["shard"]))
    backward(native)
    with _state(mesh, density=1.0).register(net):
        backward(net)
        return furthest(grads(net), grads(native))


def fp16() -> str:
    """2 x 4 ranks, where FSDP divides after the reduction, too: the gradients of native HSDP at density 1."""
    worst = max(worlds.run("gloo", 8, _fp16, timeout=300))
    if worst > 1e-3:
        raise AssertionError(f"fp16 gradients are {worst:.2e} from those of native HSDP")
    return f"fp16 on 2 x 4: {worst:.1e} from native HSDP"


def _tensor_parallel(connect: Callable[..., Any]) -> tuple[bool, bool, bool, bool]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    net: Any = make_net(width=16)
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    with _state(mesh, density=0.1).register(net, optimizer) as state:
        for step in range(5):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
        before = parts(net)
        end = poison(net, rank=5)
        optimizer.zero_grad()
        backward(net, 5)
        end()
        optimizer.step()
        skipped, unchanged = state.skipped, same(before, parts(net))
        optimizer.zero_grad()
        backward(net, 6)
        optimizer.step()
        saved = state.state_dict()["residuals"]
        whole = all(local(saved[name])[0].shape == part.shape for name, part in parts(net).items())
        return skipped, unchanged, replicas_equal(mesh, net) and not state.skipped, whole


def tensor_parallel() -> str:
    """2 x 2 x 2 ranks: a NaN on one of them skips the step on all eight."""
    found = worlds.run("gloo", 8, _tensor_parallel, timeout=300)
    if set(found) != {(True, True, True, True)}:
        raise AssertionError(f"(skipped, unchanged, equal, saved) on 2 x 2 x 2: {found}")
    return "2 x 2 x 2 with tensor parallelism: a NaN on one rank skipped the step on all eight"


def _long(connect: Callable[..., Any], steps: int) -> tuple[bool, float, float]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    with _state(mesh, density=0.01).register(net, optimizer):
        losses, equal = [], True
        for step in range(steps):
            optimizer.zero_grad()
            losses.append(backward(net, step))
            optimizer.step()
            equal = equal and replicas_equal(mesh, net)
        return equal, losses[0], sum(losses[-10:]) / 10


def long(steps: int = _STEPS) -> str:
    """Replicas have the same bits after every step, and learn."""
    found = worlds.run("gloo", 4, _long, steps, timeout=300)
    if not all(equal for equal, _, _ in found):
        raise AssertionError("replicas differ")
    if not all(last < 0.8 * first for _, first, last in found):
        raise AssertionError(f"loss at first and last: {[pair for _, *pair in found]}")
    return f"{steps} steps at 1 %: replicas the same bits; loss {found[0][1]:.2f}, then {found[0][2]:.2f}"


def _killed(connect: Callable[..., Any]) -> tuple[str, float]:
    mesh = make_mesh(2, 2)
    net = shard(make_net(), mesh["shard"])
    state = _state(mesh, density=0.05, timeout=_TIMEOUT).register(net)
    start = time.monotonic()
    try:
        for step in range(1000):
            if step == 5:
                start = time.monotonic()
            if step == 5 and dist.get_rank() == _VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            net.zero_grad()
            backward(net, step)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    state.close()
    return said, seconds


def killed() -> str:
    """A rank is killed: all others end within the timeout, and a replica of its shard names it."""
    with worlds.start("gloo", 4, _killed) as ranks:
        late = ranks.running([rank for rank in range(4) if rank != _VICTIM], 4 * _TIMEOUT)
        outcomes = {rank: ranks.outcome(rank) for rank in range(4) if rank != _VICTIM}
    if late:
        raise AssertionError(f"ranks {late} are still running")
    said = {rank: outcome.value for rank, outcome in outcomes.items()}
    if any(value is None for value in said.values()):
        raise AssertionError(f"no report: {[outcome.trace for outcome in outcomes.values()]}")
    naming = [rank for rank, (text, _) in said.items() if re.search(rf"rank {_VICTIM}\b", text)]
    slowest = max(seconds for _, seconds in said.values())
    shown = "\n".join(f"    rank {rank}: {text.splitlines()[0][:150]}" for rank, (text, _) in said.items())
    if not naming or slowest > _TIMEOUT + 10:
        raise AssertionError(f"named by {naming}, {slowest:.1f} s:\n{shown}")
    return f"rank {_VICTIM} of 2 x 2 killed: named by {naming}, all ended within {slowest:.1f} s\n{shown}"


SCENES = {"fp16": fp16, "tensor-parallel": tensor_parallel, "long": long, "killed": killed, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}; default: all")
    chosen = parser.parse_args().scenes or list(SCENES)
    torch.set_num_threads(1)
    for name in chosen:
        if name not in SCENES:
            parser.error(f"unknown scene {name!r}: choose from {', '.join(SCENES)}")
        print(SCENES[name](), flush=True)


if __name__ == "__main__":
    main()
