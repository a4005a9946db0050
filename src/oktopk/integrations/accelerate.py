"""Hugging Face Accelerate: sparse gradients for a prepared model; save_state() has the state of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..frontends.ddp import OkTopkState
from .base import RankFiles, attach, requires

with requires("accelerate", extra="accelerate"):
    from accelerate import Accelerator


def register(
    accelerator: Accelerator, model: Any, optimizer: Any = None, *, name: str = "oktopk", **settings: Any
) -> OkTopkState | None:
    """Average the gradients of a prepared model by sparse all-reduce.

    `accelerator.save_state()` then adds a file for every rank to the checkpoint, and `load_state()` reads it, also
    with another number of ranks. (`register_for_checkpointing()` would save the state of the first rank only.)

    Args:
        accelerator: the Accelerator that has prepared the model.
        model: the model that prepare() has returned.
        optimizer: the optimizer that it has returned, or None.
        name: of the files in checkpoints, `oktopk-rank0.pt` and so on; a second model needs another one.
        **settings: keywords of oktopk.OkTopkState. The `grad_scaler` is the accelerator's, unless it is given.

    Returns:
        The state; None in the only process of a job, which has nothing to average.

    Example:
        ::

            from oktopk.integrations.accelerate import register
            register(accelerator, model, optimizer, density=0.01)
    """
    optimizers = [] if optimizer is None else [optimizer]
    state = attach(model, optimizers, {"grad_scaler": accelerator.scaler, **settings})
    if state is None:
        return None

    def files(folder: str) -> RankFiles:
        return RankFiles(str(Path(folder, name)))

    # These hooks are called on all ranks, before Accelerate's own files are written or read.
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: files(folder).save(state))
    accelerator.register_load_state_pre_hook(lambda models, folder: files(folder).load(state))
    return state
