"""What model, optimizer, task and random numbers must keep to go on to the bit: tensors and primitives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oktopk import DistributedOptimizer

from .tasks import Task


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
        parameter.copy_(shared["parameters"][name])
    for name, buffer in task.model.named_buffers():
        buffer.copy_(own["buffers"][name])
    optimizer.load_state_dict({**shared["optimizer"], "oktopk": own["oktopk"]})
    if own["random"] is not None:
        _set_random(own["random"])
        task.load_state_dict(own["task"])


def _random() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
