"""PyTorch Lightning: a strategy that hooks its DDP model and saves the state of every rank.

DDPStrategy(ddp_comm_hook=...) does nothing on CPUs, and only the first rank writes checkpoints. The strategy below
hooks the model itself; beside model.ckpt it writes model.ckpt.oktopk-rank0, -rank1, and so on.

    python examples/lightning.py
    torchrun --nproc-per-node 2 examples/lightning.py --out run
    torchrun --nproc-per-node 2 examples/lightning.py --out run --resume      # as many steps again
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from common import accuracy, digits, network, options, summary
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import oktopk
from oktopk.metrics.sinks import MemorySink

sys.path.pop(0)  # this folder: without it, "lightning" is the package and not this file
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy


class OkTopkStrategy(DDPStrategy):
    """DDP with sparse gradients. Takes the keywords of oktopk.OkTopkState."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(process_group_backend="gloo")
        self.settings = settings
        self.state: oktopk.OkTopkState | None = None
        self.resumed_from: Path | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.training:  # otherwise there is no DDP model
            self.state = oktopk.OkTopkState(**self.settings).register(self.model, *self.optimizers)
            if self.resumed_from is not None:
                self.state.load_state_dict(torch.load(self.own_file(self.resumed_from), weights_only=True))

    def own_file(self, checkpoint: str | Path) -> Path:
        return Path(f"{checkpoint}.oktopk-rank{self.global_rank}")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)
        if self.state is not None:
            self.own_file(filepath).parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.state.state_dict(), self.own_file(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.resumed_from = Path(checkpoint_path)  # the state is made later, in setup()
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        self.own_file(filepath).unlink(missing_ok=True)

    def teardown(self) -> None:
        if self.state is not None:
            self.state.close()
        super().teardown()


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

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
    module, memory = Digits(), MemorySink()
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
    loader = DataLoader(train, batch_size=32, shuffle=True)
    trainer.fit(module, loader, ckpt_path=checkpoint if chosen.resume else None)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint, weights_only=False)
    if trainer.is_global_zero:
        print(summary(trainer.world_size, accuracy(module.network, test), memory))


if __name__ == "__main__":
    main()
