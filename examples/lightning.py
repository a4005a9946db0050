"""Lightning: a strategy for its Trainer. Checkpoints have the state of every rank.

Beside model.ckpt there are model.ckpt.oktopk-rank0.pt, -rank1.pt, and so on.

    python examples/lightning.py
    torchrun --nproc-per-node 2 examples/lightning.py --out run
    torchrun --nproc-per-node 2 examples/lightning.py --out run --resume      # as many steps again
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from common import accuracy, batches, digits, network, options, summary
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from oktopk.metrics.sinks import MemorySink

sys.path.pop(0)  # this folder: without it, "lightning" is the package and not this file
from lightning.pytorch import LightningModule, Trainer

from oktopk.integrations.lightning import OkTopkStrategy


class Digits(LightningModule):
    def __init__(self, data: TensorDataset) -> None:
        super().__init__()
        self.network, self.data = network(), data

    def train_dataloader(self) -> Iterator[list[torch.Tensor]]:
        """The batches of the steps to come, without a length: a resumed epoch counts those of the run before."""
        steps = range(self.trainer.global_step, self.trainer.max_steps)
        return batches(self.data, self.trainer.global_rank, self.trainer.world_size, steps)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    chosen = parser.parse_args()
    torch.set_num_threads(1)

    train, test = digits()
    module, memory = Digits(train), MemorySink()
    checkpoint = chosen.out / "model.ckpt" if chosen.out else None
    done = torch.load(checkpoint, weights_only=False)["global_step"] if chosen.resume else 0
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy=OkTopkStrategy(
            density=chosen.density,
            warmup_steps=chosen.warmup_steps,
            auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
            sinks=[memory],
        ),
        max_steps=done + chosen.steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=checkpoint if chosen.resume else None)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint, weights_only=False)
    if trainer.is_global_zero:
        print(summary(trainer.world_size, accuracy(module.network, test), memory))


if __name__ == "__main__":
    main()
