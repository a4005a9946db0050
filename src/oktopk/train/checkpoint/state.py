"""Capture and restore model, optimizer, task and random state, so that a run resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from oktopk.engine.settings import UPDATES

from ..sharded import cut, distribute_state, gather, is_sharded, to_parts
from ..tasks import Task
from .snapshot import CheckpointError


class Stateful(Protocol):
    """An optimizer with its reducer, such as DistributedOptimizer; "oktopk" of its state is this rank's own.

    So is all of its state if updates are averaged, because then moments differ from rank to rank, and if the
    model is sharded.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def capture_state(task: Task[Any], optimizer: Stateful) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that all ranks share, and this rank's own; collective, if the model is sharded."""
    state = to_parts(optimizer.state_dict())
    oktopk = state.pop("oktopk")
    shared: dict[str, Any] = {"parameters": {name: gather(p) for name, p in task.model.named_parameters()}}
    own: dict[str, Any] = {}
    apart = is_sharded(task.model) or oktopk.get("averages") == UPDATES
    (own if apart else shared)["optimizer"] = state
    own |= {
        "oktopk": oktopk,
        "buffers": dict(task.model.named_buffers()),
        "random": _random_state(),
        "task": task.state_dict(),
    }
    return shared, own


@torch.no_grad()
def restore_state(task: Task[Any], optimizer: Stateful, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Restore a saved state; after a change of the number of ranks, random and task state are not restored."""
    for name, parameter in task.model.named_parameters():
        _copy(shared["parameters"][name], parameter, name)
    for name, buffer in task.model.named_buffers():
        _copy(own["buffers"][name], buffer, name)
    state = own["optimizer"] if "optimizer" in own else shared["optimizer"]
    if is_sharded(task.model):
        state = distribute_state(state, optimizer.param_groups)
    optimizer.load_state_dict({**state, "oktopk": own["oktopk"]})
    if own["random"] is not None:
        _set_random_state(own["random"])
        task.load_state_dict(own["task"])


def _copy(saved: Tensor, into: Tensor, name: str) -> None:
    """Copy after checking the shape: copy_ alone would broadcast a scalar."""
    if saved.shape != into.shape:
        raise ValueError(f"{name} has shape {list(saved.shape)}, expected {list(into.shape)}")
    with _name_in_error(name):
        into.copy_(cut(saved, into))


@contextmanager
def explain_bad_state(step: int) -> Iterator[None]:
    """Turn the errors of a checkpoint with valid digests but unusable content into a CheckpointError.

    Errors that have other causes, such as a failed rank or lack of memory, pass through.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint of step {step} does not match this run: {error!r}") from error


@contextmanager
def _name_in_error(name: str) -> Iterator[None]:
    """Name the tensor in torch's errors about one that does not fit, such as a sparse one."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"{name}: {error}") from error


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    with _name_in_error("random state"):
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
