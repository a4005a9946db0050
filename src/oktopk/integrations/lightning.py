"""Lightning: a strategy that averages sparse gradients, and saves the state of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..frontends.ddp import OkTopkState
from .base import RankFiles, attach, requires

with requires("lightning", extra="lightning"):
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy


class OkTopkStrategy(DDPStrategy):
    """DDP with sparse gradients.

    Beside a checkpoint `last.ckpt` every rank writes `last.ckpt.oktopk-rank0.pt` and so on, by Lightning's own
    checkpoint plug-in; `Trainer.fit(ckpt_path=…)` loads them, also with another number of ranks. They are removed
    with the checkpoint, and a checkpoint of weights only has none.

    Args:
        ddp: keywords of Lightning's DDPStrategy, such as {"find_unused_parameters": True}.
        **settings: keywords of oktopk.OkTopkState. The `grad_scaler` is that of Lightning, unless it is given.

    Attributes:
        state: the OkTopkState while the trainer fits, and after that; None before.

    Example:
        ::

            from oktopk.integrations.lightning import OkTopkStrategy
            trainer = Trainer(strategy=OkTopkStrategy(density=0.01))
    """

    def __init__(self, ddp: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**(ddp or {}))
        self.settings = settings
        self.state: OkTopkState | None = None
        self._resumed_from: str | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.training:  # otherwise there is no DDP model
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.state = attach(self.model, self.optimizers, {"grad_scaler": scaler, **self.settings})
            if self.state is not None and self._resumed_from is not None:
                self._files(self._resumed_from).load(self.state)
        self._resumed_from = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Called on all ranks, of which the first writes the checkpoint itself."""
        if self.state is not None and "optimizer_states" in checkpoint:
            self._files(filepath).save(self.state)
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called before setup(), which makes the state."""
        self._resumed_from = str(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        self.checkpoint_io.remove_checkpoint(self._files(filepath).path(self.global_rank))

    def teardown(self) -> None:
        if self.state is not None:
            self.state.close()
        super().teardown()

    def _files(self, checkpoint: str | Path) -> RankFiles:
        """Those of a checkpoint, also if its path is a link, such as `last.ckpt` with save_last="link"."""
        place = Path(checkpoint)
        stem = place.resolve() if place.is_symlink() else checkpoint
        return RankFiles(f"{stem}.oktopk", self.checkpoint_io.save_checkpoint, self.checkpoint_io.load_checkpoint)
