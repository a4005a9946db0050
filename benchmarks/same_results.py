"""Whether two versions of oktopk train to the same parameters, to the bit.

    python benchmarks/same_results.py OTHER/.venv/bin/python

Trains a small network for 200 steps with each front end (DDP hook, wrapped optimizer, hand-written loop),
algorithm (oktopk, topka, dense) and number of ranks (2 and 4): 20 dense warm-up steps, then sparse ones, and one
step that is skipped because a gradient is NaN. Every cell runs under this interpreter and under the other one; a
digest of the parameters after every 20 steps is compared. The exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk

FRONT_ENDS = ("ddp", "optimizer", "loop")
ALGORITHMS = ("oktopk", "topka", "dense")
STEPS, WARMUP, LOST, EVERY = 200, 20, 120, 20
BUCKET_MB = 0.1
TIMEOUT = 300


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    x, y = torch.randn(16, 32, generator=generator), torch.randint(10, (16,), generator=generator)
    loss = nn.functional.cross_entropy(model(x), y)
    if step == LOST and rank == 1:  # NaN in the last bucket only: those before it have been exchanged by then
        loss = loss + math.nan * next(p for name, p in model.named_parameters() if name.endswith("0.bias")).sum()
    return loss


def train_with_ddp(model: nn.Module, options: dict[str, Any], algorithm: str) -> Callable[[int, int], None]:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    oktopk.OkTopkState(None, algorithm, **options).register(wrapped, optimizer)

    def step(rank: int, number: int) -> None:
        optimizer.zero_grad()
        loss_of(wrapped, rank, number).backward()
        optimizer.step()

    return step


def train_with_optimizer(model: nn.Module, options: dict[str, Any], algorithm: str) -> Callable[[int, int], None]:
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer = oktopk.DistributedOptimizer(
        inner, model.named_parameters(), algorithm, buckets=BUCKET_MB, **options
    )

    def step(rank: int, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()

    return step


def train_with_loop(model: nn.Module, options: dict[str, Any], algorithm: str) -> Callable[[int, int], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    reducer = oktopk.AllReducer(model.named_parameters(), algorithm, buckets=BUCKET_MB, **options)

    def step(rank: int, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        reducer.sync({name: parameter.grad for name, parameter in model.named_parameters()})
        if not reducer.skipped:
            optimizer.step()

    return step


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def job(front_end: str, algorithm: str) -> None:
    """One rank; rank 0 prints the digests, which must be the same on all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, model = dist.get_rank(), make_model()
    options = {"density": 0.02, "warmup_steps": WARMUP, "auto": False, "values": "fp32"}
    train = {"ddp": train_with_ddp, "optimizer": train_with_optimizer, "loop": train_with_loop}[front_end]
    step, digests = train(model, options, algorithm), []
    for number in range(STEPS):
        step(rank, number)
        if (number + 1) % EVERY == 0 or number == LOST:
            digests.append(digest(model))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, digests)
    if rank == 0:
        assert all(theirs == digests for theirs in everybody), "replicas differ"
        print(json.dumps(digests), flush=True)
    dist.barrier()
    os._exit(0)


def run(python: str, front_end: str, algorithm: str, world: int) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
    }  # fmt: skip
    command = [python, __file__, "--job", front_end, algorithm]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise SystemExit(f"{python}: {front_end} {algorithm} on {world} ranks failed")
    digests: list[str] = json.loads(printed[0])
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", help="the Python interpreter of the other environment")
    parser.add_argument("--job", nargs=2, metavar=("FRONT_END", "ALGORITHM"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        job(*given.job)
    if given.other is None:
        parser.error("name the Python interpreter of the other environment")
    differ = 0
    for world, front_end, algorithm in itertools.product((2, 4), FRONT_ENDS, ALGORITHMS):
        here, there = (run(python, front_end, algorithm, world) for python in (sys.executable, given.other))
        differ += here != there
        print(
            f"{front_end:10} {algorithm:8} P = {world}   {'same' if here == there else f'{here} {there}'}",
            flush=True,
        )
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
