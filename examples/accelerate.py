"""Hugging Face Accelerate: hook the prepared model; save_state() and load_state() include the state of every rank.

python examples/accelerate.py
torchrun --nproc-per-node 2 examples/accelerate.py --out run
torchrun --nproc-per-node 2 examples/accelerate.py --out run --resume     # as many steps again
"""

from __future__ import annotations

import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from common import accuracy, digits, join_or_be_alone, network, options, summary
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import oktopk
from oktopk.metrics.sinks import MemorySink

sys.path.pop(0)  # this folder: without it, "accelerate" is the package and not this file
from accelerate import Accelerator


def save_with(accelerator: Accelerator, state: oktopk.OkTopkState) -> None:
    """Make the state a part of the accelerator's checkpoints.

    register_for_checkpointing() is not enough: it only writes the state of the first rank.
    These hooks run on all ranks.
    """

    name = f"oktopk-rank{accelerator.process_index}.pt"

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(state.state_dict(), Path(folder) / name)

    def load(models: list[Any], folder: str) -> None:
        state.load_state_dict(torch.load(Path(folder) / name, weights_only=True))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()  # otherwise a lone process gets no DDP model, and has nothing to hook
    accelerator = Accelerator(cpu=True)

    train, test = digits()
    plain, sgd = network(), torch.optim.SGD
    model, optimizer, loader = accelerator.prepare(
        plain, sgd(plain.parameters(), lr=0.1, momentum=0.9), DataLoader(train, batch_size=32, shuffle=True)
    )
    memory = MemorySink()
    state = oktopk.OkTopkState(
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
        sinks=[memory],
    ).register(model, optimizer)
    save_with(accelerator, state)
    if chosen.resume:
        accelerator.load_state(str(chosen.out))
        accelerator.print(f"goes on from step {state.step}")

    for x, y in islice(cycle(loader), chosen.steps):
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()

    accelerator.print(summary(accelerator.num_processes, accuracy(accelerator.unwrap_model(model), test), memory))
    if chosen.out:
        accelerator.save_state(str(chosen.out))
    state.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
