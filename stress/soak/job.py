"""One rank of the soak test: `python -m stress.soak.job STEPS SEED`, started by run.py. Rank 0 prints the findings
of all.

A small DDP model trains through what a long run meets: gradients whose scale drifts over four orders of magnitude,
a density that changes from step to step, non-finite values on a random rank, and parameters that are unused on
random ranks or on all of them. Along the way the ranks compare their replicas, balance their ledgers, and check
their memory.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import oktopk
from oktopk.metrics.events import SPARSE, StepEvent
from stress.soak.ledger import Ledger

FEATURES, CLASSES, BATCH = 32, 10, 8
DENSITY, VALUES = 0.01, "fp16"
BAD, IDLE = 0.005, 0.2
"""The share of steps with a number that is not finite, and of those in which somebody leaves out a head."""
PERIOD = 1500
"""Steps in which the scale of gradients goes up and down once, by a factor of 100 either way."""
LOOKS = 100
"""How often ranks compare."""
MEMORY_EVERY = 1000
"""Steps between looks at the memory, which take half a second; a short run has four of them."""
TIMEOUT = 60.0


class Heads(nn.Module):
    """9,962 parameters; the second head is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(FEATURES, 128), nn.Linear(128, CLASSES)
        self.other = nn.Sequential(nn.Linear(128, 32), nn.Linear(32, CLASSES, bias=False))

    def forward(self, x: Tensor, other: bool) -> Tensor:
        h = torch.tanh(self.trunk(x))
        return self.head(h) + self.other(h) if other else self.head(h)


@dataclass(frozen=True)
class Trouble:
    """The disturbances of one step; all ranks draw the same."""

    scale: float
    idle: frozenset[int]
    """Ranks that do not use the second head."""
    bad: tuple[int, str, float] | None
    """A rank, a parameter, and what an entry of it is there."""

    @classmethod
    def draw(cls, step: int, seed: int, world: int, names: list[str]) -> Trouble:
        chance = random.Random(f"{seed} {step}")
        scale = 10.0 ** (2.0 * math.sin(2.0 * math.pi * step / PERIOD)) * math.exp(chance.gauss(0.0, 0.2))
        count = chance.randint(1, world) if chance.random() < IDLE else 0
        idle = frozenset(chance.sample(range(world), count))
        kind = chance.choice([math.nan, math.inf, -math.inf])
        bad = (chance.randrange(world), chance.choice(names), kind) if chance.random() < BAD else None
        return cls(scale, idle, bad)


def batch(step: int, seed: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((1_000_003 * seed + step) * world + rank)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


@dataclass
class Findings:
    """The findings of one rank."""

    steps: int = 0
    sparse_steps: int = 0
    skipped: int = 0
    wrongly_skipped: int = 0
    """Steps that were skipped without a reason, or not skipped in spite of one."""
    partly_unused: int = 0
    unused: int = 0
    """Steps in which some ranks, and in which all, left out the second head."""
    fewest: float = math.inf
    most: float = 0.0
    """Of what a rank has selected over k, in all sparse steps."""
    densest: float = 0.0
    sparsest: float = 1.0
    looks: int = 0
    divergent: int = 0
    """Looks at which replicas were not the same."""
    imbalance: float = 0.0
    """The worst of all looks."""
    seconds: float = 0.0
    memory: list[dict[str, int]] = field(default_factory=list)
    """Now and then."""

    def note(self, event: StepEvent, trouble: Trouble, available: int, world: int) -> None:
        self.steps += 1
        self.skipped += event.skipped
        self.wrongly_skipped += event.skipped != (trouble.bad is not None)
        self.partly_unused += 0 < len(trouble.idle) < world
        self.unused += len(trouble.idle) == world
        if event.skipped or event.phase != SPARSE:
            return
        self.sparse_steps += 1
        self.densest = max(self.densest, event.target_density)
        self.sparsest = min(self.sparsest, event.target_density)
        (reduction,) = event.reductions  # small buckets share their messages
        k = reduction.target_count
        self.fewest = min(self.fewest, reduction.local_count / min(k, available))  # nobody sends what is not there
        self.most = max(self.most, reduction.local_count / k)

    def look(self, replica: Tensor, imbalance: float) -> None:
        self.looks += 1
        self.divergent += not same_everywhere(replica)
        self.imbalance = max(self.imbalance, imbalance)


def digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Digest of everything that must be identical on all ranks."""
    found = hashlib.sha256()
    for parameter in net.parameters():
        for tensor in (parameter.detach(), *optimizer.state.get(parameter, {}).values()):
            found.update(tensor.numpy().tobytes())
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)


def same_everywhere(mine: Tensor) -> bool:
    heard = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(heard, mine)
    return all(torch.equal(mine, one) for one in heard)


def in_memory() -> dict[str, int]:
    """Resources of this process, as reported by Linux and Python."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    gc.collect()
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def due(step: int, steps: int, every: int) -> bool:
    """Whether a periodic action is due after this step; it is always due at the end."""
    return (step + 1) % max(1, every) == 0 or step + 1 == steps


def soak(steps: int, seed: int) -> Findings:
    torch.manual_seed(seed)
    rank, world, found = dist.get_rank(), dist.get_world_size(), Findings()
    net = DistributedDataParallel(Heads(), bucket_cap_mb=0.02, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    names = [name for name, _ in net.module.named_parameters()]
    warmup = steps // 50
    with oktopk.OkTopkState(
        density=DENSITY, warmup_steps=warmup, ramp_steps=steps // 2, values=VALUES, auto=False,
        named_parameters=net.module.named_parameters(), timeout=TIMEOUT,
    ) as state:  # fmt: skip
        ledger = Ledger(net.module, state)
        trouble = Trouble.draw(0, seed, world, names)

        def hook(state, bucket):  # DDP would look at annotations, and wants types in them, not text
            ledger.take(bucket, trouble.bad)
            return oktopk.oktopk_hook(state, bucket)

        net.register_comm_hook(state, hook)
        state.guard(optimizer)
        start = time.perf_counter()
        for step in tqdm(range(steps), unit="step", disable=rank > 0, mininterval=1.0):
            trouble = Trouble.draw(step, seed, world, names)
            x, y = batch(step, seed, rank, world)
            optimizer.zero_grad()
            ledger.open(lost=step >= warmup and trouble.bad is not None)
            (trouble.scale * F.cross_entropy(net(x, rank not in trouble.idle), y)).backward()
            ledger.close()
            optimizer.step()
            found.note(state.last, trouble, ledger.available, world)
            if due(step, steps, steps // LOOKS):
                found.look(digest(net, optimizer), ledger.imbalance())
            if due(step, steps, min(MEMORY_EVERY, steps // 4)):
                found.memory.append({"step": step + 1, **in_memory()})
        found.seconds = time.perf_counter() - start
    return found


def main(steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("oktopk").setLevel(logging.ERROR)  # skipped steps are meant, and counted
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    try:
        findings = [None] * dist.get_world_size()
        dist.all_gather_object(findings, soak(steps, seed))
        if dist.get_rank() == 0:
            print(json.dumps([asdict(one) for one in findings]), flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
