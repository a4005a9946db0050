"""A job for torchrun that saves its state now and then, and goes on from there when it is started again.

python restart.py DIRECTORY [--die-at STEP]

Every rank saves a file of its own. With --die-at, rank 1 kills itself in the backward pass of that step, once.
"""

from __future__ import annotations

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk

STEPS, SAVE_EVERY, WARMUP, VICTIM = 20, 5, 3, 1
TIMEOUT = 30.0


def checkpoint(directory: Path, rank: int, step: int) -> Path:
    return directory / f"step{step}-rank{rank}.pt"


def save(path: Path, what: dict[str, Any]) -> None:
    """All of it or nothing: this process may be killed at any time."""
    part = path.with_suffix(".part")
    torch.save(what, part)
    part.replace(path)


def last_complete(directory: Path, world: int) -> int:
    """The last step that all ranks have saved; 0 if there is none."""
    saved = range(SAVE_EVERY, STEPS, SAVE_EVERY)
    return max((n for n in saved if all(checkpoint(directory, r, n).exists() for r in range(world))), default=0)


def die(_: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(directory: Path, die_at: int | None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    start = last_complete(directory, world)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 5))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    state = oktopk.OkTopkState(density=0.05, warmup_steps=WARMUP, auto=False, timeout=TIMEOUT)
    state.register(model, optimizer)
    if start:
        saved = torch.load(checkpoint(directory, rank, start), weights_only=True)
        layers.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["oktopk"])
        save(directory / f"resumed-rank{rank}.pt", {"step": start, "oktopk": state.state_dict()})

    def everything() -> dict[str, Any]:
        return {
            "model": layers.state_dict(),
            "optimizer": optimizer.state_dict(),
            "oktopk": state.state_dict(),
        }

    for step in range(start, STEPS):
        if step == die_at and rank == VICTIM:
            layers[2].weight.register_hook(die)  # the last layer is exchanged by then, the first is not computed
        data = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(16, 20, generator=data), torch.randn(16, 5, generator=data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < STEPS:
            save(checkpoint(directory, rank, step + 1), everything())
    save(directory / f"final-rank{rank}.pt", everything())
    state.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    train(options.directory, options.die_at if first_life else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
