"""The time of a training step without communication: forward, backward and optimizer, measured or given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from oktopk.train.building import build_optimizer
from oktopk.train.config.options import TrainConfig
from oktopk.train.tasks import Task

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}
"""Optimizers that replace the network's own, by name."""
WARM, LEAST, MOST = 2, 3, 10
"""Untimed steps, and the fewest and most timed ones."""
BUDGET = 10.0
"""Seconds after which no more than the fewest steps are timed."""
_BACKWARD_SHARE = 2 / 3
"""Backward has about twice the operations of forward."""


@dataclass(frozen=True)
class ModelStep:
    """The seconds of a step without communication.

    Attributes:
        what: where they come from, such as "gpt, AdamW, batch 16".
        forward: seconds of the forward pass, with waiting for data.
        backward: seconds of the backward pass, behind which an exchange can hide.
        update: seconds of clipping and the optimizer.
    """

    what: str
    forward: float
    backward: float
    update: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update

    @classmethod
    def given(cls, seconds: float) -> ModelStep:
        """A step whose time the user knows; two thirds of it are taken for backward."""
        backward = _BACKWARD_SHARE * seconds
        return cls("as given; two thirds of it taken for backward", seconds - backward, backward)


def time_model_step(config: TrainConfig, task: Task[Any], optimizer: str | None = None) -> ModelStep:
    """Time steps of a task on this rank alone: the median of each part. The weights stay as they are.

    Args:
        config: the options of the run.
        task: the model and data to time.
        optimizer: a name in OPTIMIZERS; None for the network's own.
    """
    parameters = task.model.parameters()
    chosen = (
        build_optimizer(replace(config, lr=0.0), task.model)
        if optimizer is None
        else OPTIMIZERS[optimizer](parameters, lr=0.0)
    )
    batches = _repeat(task)
    task.model.train()
    taken: list[list[float]] = []
    end = time.perf_counter() + BUDGET
    while len(taken) < WARM + LEAST or (len(taken) < WARM + MOST and time.perf_counter() < end):
        taken.append(_step(config, task, chosen, batches))
    forward, backward, update = (statistics.median(part) for part in zip(*taken[WARM:], strict=True))
    what = f"{config.dnn}, {type(chosen).__name__}, batch {config.batch_size}"
    return ModelStep(what, forward, backward, update)


def _repeat(task: Task[Any]) -> Iterator[Any]:
    while True:
        yield from task.batches(0)


def _step(config: TrainConfig, task: Task[Any], optimizer: Optimizer, batches: Iterator[Any]) -> list[float]:
    """Seconds of forward, backward and update."""
    forward = backward = 0.0
    optimizer.zero_grad(set_to_none=True)
    for _ in range(config.nsteps_update):
        start = time.perf_counter()
        loss = task.loss(next(batches)) / config.nsteps_update
        _wait_for_gpu()
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        _wait_for_gpu()
        forward, backward = forward + middle - start, backward + time.perf_counter() - middle
    start = time.perf_counter()
    if config.clip is not None:
        clip_grad_norm_(task.model.parameters(), config.clip)
    optimizer.step()
    _wait_for_gpu()
    return [forward, backward, time.perf_counter() - start]


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
