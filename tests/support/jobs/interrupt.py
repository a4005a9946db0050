"""Trains with the DDP hook until it is interrupted. Under torchrun."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(500, 500))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = oktopk.OkTopkState(warmup_steps=2, auto=False, timeout=30).register(model, optimizer)
    while state.step < 100_000:
        optimizer.zero_grad()
        model(torch.randn(4, 500)).square().mean().backward()
        optimizer.step()
        if state.step == 10 and dist.get_rank() == 0:
            print("under way", flush=True)


if __name__ == "__main__":
    main()
