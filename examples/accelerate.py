"""Hugging Face Accelerate: one line for the prepared model; save_state() and load_state() include all ranks.

python examples/accelerate.py
torchrun --nproc-per-node 2 examples/accelerate.py --out run
torchrun --nproc-per-node 2 examples/accelerate.py --out run --resume     # as many steps again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from common import accuracy, digits, join_or_be_alone, network, options, summary
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from oktopk.metrics.sinks import MemorySink

sys.path.pop(0)  # this folder: without it, "accelerate" is the package and not this file
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration

from oktopk.integrations.accelerate import register


def batches(loader: DataLoader, steps: range) -> Iterator[list[Tensor]]:
    """The batches of these steps, whatever a run before this one has used."""
    epoch, done = divmod(steps.start, len(loader))
    while True:
        loader.set_epoch(epoch)
        for batch in skip_first_batches(loader, done):
            if steps.start == steps.stop:
                return
            steps = steps[1:]
            yield batch
        epoch, done = epoch + 1, 0


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()  # otherwise a lone process gets no DDP model, and has nothing to hook
    # The seedable sampler: all ranks shuffle alike, and a run that resumes shuffles as the one before.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))

    train, test = digits()
    plain, sgd = network(), torch.optim.SGD
    model, optimizer, loader = accelerator.prepare(
        plain, sgd(plain.parameters(), lr=0.1, momentum=0.9), DataLoader(train, batch_size=32, shuffle=True)
    )
    memory = MemorySink()
    state = register(
        accelerator, model, optimizer,
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
        sinks=[memory],
    )  # fmt: skip
    if chosen.resume:
        accelerator.load_state(str(chosen.out))
        accelerator.print(f"goes on from step {state.step}")

    for x, y in batches(loader, range(state.step, state.step + chosen.steps)):
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
