"""Trains with the DDP hook until it is interrupted, and leaves a note when it is under way. Under torchrun.

python interrupt.py FOLDER
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests may ignore it
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(500, 500))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = oktopk.OkTopkState(warmup_steps=2, auto=False, timeout=30).register(model, optimizer)
    while state.step < 100_000:
        optimizer.zero_grad()
        model(torch.randn(4, 500)).square().mean().backward()
        optimizer.step()
        if state.step == 10:
            Path(sys.argv[1], f"under way {dist.get_rank()}").touch()


if __name__ == "__main__":
    main()
