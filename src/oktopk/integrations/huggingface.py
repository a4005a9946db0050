"""Hugging Face transformers: a callback that averages sparse gradients, and saves the state of every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..frontends.ddp import OkTopkState
from .base import RankFiles, attach, requires

with requires("transformers", extra="huggingface"):
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint


class OkTopkCallback(TrainerCallback):
    """Sparse gradients for a Trainer.

    Every rank adds `oktopk-rank0.pt` and so on to the folder of a checkpoint, unless that is saved for its weights
    only. `trainer.train(resume_from_checkpoint=…)` loads them, also with another number of ranks. The callback
    learns the folder from that call: it replaces `trainer.train` by a function that notes its argument.

    Args:
        trainer: the Trainer that the callback is added to.
        **settings: keywords of oktopk.OkTopkState. The `grad_scaler` is the trainer's, unless it is given.

    Attributes:
        state: the OkTopkState while the trainer trains, and after that; None before.

    Example:
        ::

            from oktopk.integrations.huggingface import OkTopkCallback
            trainer.add_callback(OkTopkCallback(trainer, density=0.01))
    """

    def __init__(self, trainer: Trainer, **settings: Any) -> None:
        self.trainer, self.settings = trainer, settings
        self.state: OkTopkState | None = None
        self._resumed_from: str | bool | None = None
        self._train: Callable[..., Any] = trainer.train
        trainer.train = self._note_and_train

    def _note_and_train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        self._resumed_from = resume_from_checkpoint
        return self._train(resume_from_checkpoint, *args, **kwargs)

    def on_train_begin(self, args: TrainingArguments, *_: Any, optimizer: Any, **__: Any) -> None:
        self._close()  # of an attempt with larger batches, by auto_find_batch_size
        # The model that callbacks are given is the bare one; the trainer has the one in DDP.
        settings = {"grad_scaler": self.trainer.accelerator.scaler, **self.settings}
        self.state = attach(self.trainer.model_wrapped, [optimizer], settings)
        folder = self._resumed_from
        if folder is True:
            folder = get_last_checkpoint(args.output_dir)
        if folder and self.state is not None:
            self._files(Path(str(folder))).load(self.state)

    def on_save(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        """Called on all ranks."""
        if self.state is not None and not args.save_only_model:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self._files(folder).save(self.state)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.state is not None:
            self.state.close()

    @staticmethod
    def _files(folder: Path) -> RankFiles:
        return RankFiles(str(folder / "oktopk"))
