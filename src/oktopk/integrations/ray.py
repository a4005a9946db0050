"""Ray Train: sparse gradients for a prepared model; reported checkpoints have the state of every worker."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..comm import Communicator, gather_json
from ..frontends.ddp import OkTopkState
from .base import RankFiles, attach, requires

with requires("ray", extra="ray"):
    import ray.train

_states: dict[str, OkTopkState] = {}
"""Of this worker, by the name of their files: a process of its own, which runs one training function."""


def register(model: Any, optimizer: Any = None, *, name: str = "oktopk", **settings: Any) -> OkTopkState | None:
    """Average the gradients of a prepared model by sparse all-reduce; in the training function of a TorchTrainer.

    If Ray restores the job from a checkpoint, so does this function, also with another number of workers.

    Args:
        model: the model that ray.train.torch.prepare_model() has returned.
        optimizer: its optimizer, or None.
        name: of the files in checkpoints, `oktopk-rank0.pt` and so on; a second model needs another one.
        **settings: keywords of oktopk.OkTopkState.

    Returns:
        The state; None in the only worker of a job, which has nothing to average.

    Example:
        ::

            from oktopk.integrations.ray import register, report     # instead of ray.train.report
            register(model, optimizer, density=0.01)
    """
    state = attach(model, [] if optimizer is None else [optimizer], settings)
    if state is not None:
        _states[name] = state
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                _files(folder, name).load(state)
    return state


def report(metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
    """Do as ray.train.report() does, and add the states of all workers to the checkpoint.

    If one worker reports a checkpoint, as usual the first, the others report one that has nothing but their state;
    Ray merges them.

    Args:
        metrics: see ray.train.report().
        checkpoint: made by ray.train.Checkpoint.from_directory(), or None.
        **options: see ray.train.report().
    """
    if _states and _any_rank(next(iter(_states.values())), checkpoint is not None):
        if checkpoint is None:
            checkpoint = ray.train.Checkpoint.from_directory(tempfile.mkdtemp(prefix="oktopk-"))
            options["delete_local_checkpoint_after_upload"] = True
        for name, state in _states.items():
            _files(checkpoint.path, name).save(state)
    ray.train.report(metrics, checkpoint=checkpoint, **options)


def _any_rank(state: OkTopkState, here: bool) -> bool:
    """Whether something is true on any rank."""

    def ask(comm: Communicator) -> bool:
        return any(gather_json(comm, here, "checkpoint"))

    return state.run(ask)


def _files(folder: str, name: str) -> RankFiles:
    return RankFiles(str(Path(folder, name)))
