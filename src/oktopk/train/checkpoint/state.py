"""What model, optimizer, task and random numbers must keep to go on to the bit: tensors and primitives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oktopk import DistributedOptimizer

from ..tasks import Task
from .snapshot import CheckpointError


def state_of(task: Task[Any], optimizer: DistributedOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is the same on all ranks, and what is this rank's own."""
    state = optimizer.state_dict()
    oktopk = state.pop("oktopk")
    shared = {"parameters": dict(task.model.named_parameters()), "optimizer": state}
    own = {
        "oktopk": oktopk,
        "buffers": dict(task.model.named_buffers()),
        "random": _random(),
        "task": task.state_dict(),
    }
    return shared, own


@torch.no_grad()
def restore(
    task: Task[Any], optimizer: DistributedOptimizer, shared: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """What another number of ranks has saved has no random numbers, and no state of the task."""
    for name, parameter in task.model.named_parameters():
        _copy(shared["parameters"][name], parameter, name)
    for name, buffer in task.model.named_buffers():
        _copy(own["buffers"][name], buffer, name)
    optimizer.load_state_dict({**shared["optimizer"], "oktopk": own["oktopk"]})
    if own["random"] is not None:
        _set_random(own["random"])
        task.load_state_dict(own["task"])


def _copy(saved: Tensor, into: Tensor, name: str) -> None:
    """copy_ alone would spread a single number over all of a tensor."""
    if saved.shape != into.shape:
        raise ValueError(f"{name} is of shape {list(saved.shape)}, not {list(into.shape)}")
    with _torch_says(name):
        into.copy_(saved)


@contextmanager
def as_state_of_a_run(step: int) -> Iterator[None]:
    """What a checkpoint's files hold is no state of this run, though all their digests fit: one clear error.

    Not what has nothing to do with them: another rank that fails meanwhile, or a lack of memory.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint of step {step} holds no state of such a run: {error!r}") from error


@contextmanager
def _torch_says(name: str) -> Iterator[None]:
    """That a tensor is none that fits here; a sparse one, for example."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"{name}: {error}") from error


def _random() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random(state: Mapping[str, Any]) -> None:
    with _torch_says("random numbers"):
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
