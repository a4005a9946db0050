"""What the integrations share: the state of a model, its checkpoints, and the error of a missing framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..comm import Communicator, agree
from ..frontends.ddp import OkTopkState
from ..frontends.wrapped import redistribute
from ..utils.extras import install_command
from ..utils.files import atomic_path

_log = logging.getLogger(__name__)


@contextmanager
def requires(framework: str, extra: str) -> Iterator[None]:
    """Import a framework in the block; if it is missing, the error says how to install it.

    Args:
        framework: the module that may be missing.
        extra: the extra of oktopk that installs it, which is also the name of the integration.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != framework:
            raise  # the framework is here, but something that it needs is not
        raise ImportError(
            f"oktopk.integrations.{extra} needs {framework}: {install_command(extra)}", name=framework
        ) from error


def attach(model: Any, optimizers: Iterable[Optimizer], settings: Mapping[str, Any]) -> OkTopkState | None:
    """Register a new state with the model that a framework has made, and guard its optimizers.

    Args:
        model: the DistributedDataParallel model. Frameworks do not wrap the model of a single process: then there
            is nothing to average, and None is returned.
        optimizers: the optimizers to guard.
        settings: keywords of OkTopkState; without a `grad_scaler`, there is none.
    """
    if not hasattr(model, "register_comm_hook") and not (dist.is_initialized() and dist.get_world_size() > 1):
        _log.warning("oktopk has nothing to average: this is the only process; start several, by torchrun for one")
        return None
    state = OkTopkState(**settings).register(model)
    for optimizer in optimizers:
        state.guard(optimizer)
    return state


def _write(state: dict[str, Any], path: str) -> None:
    with atomic_path(Path(path)) as draft:
        torch.save(state, draft)


def _read(path: str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RankFiles:
    """The states of all ranks in a checkpoint, one file for each: residuals differ from rank to rank.

    Attributes:
        stem: what the paths begin with; "-rank0.pt" and so on follow.
        write: writes a state to a path.
        read: reads it back; raises FileNotFoundError if there is none.
    """

    stem: str
    write: Callable[[dict[str, Any], str], None] = _write
    read: Callable[[str], dict[str, Any]] = _read

    def path(self, rank: int) -> str:
        return f"{self.stem}-rank{rank}.pt"

    def save(self, state: OkTopkState) -> None:
        """Save this rank's state. All ranks call it, each for itself."""
        saved = state.state_dict()
        self.write(saved, self.path(saved["rank"]))

    def load(self, state: OkTopkState) -> None:
        """Load this rank's state; if another number of ranks has saved, these share the residuals of those.

        All ranks call it together. What one of them cannot load, none does. A checkpoint that was made without
        oktopk is fine: then residuals start at zero, after a warm-up.
        """
        saved = state.run(self._find)
        if saved is None:
            _log.warning("%s: no such file, so residuals start at zero", self.path(0))
        else:
            state.load_state_dict(saved)

    def _find(self, comm: Communicator) -> dict[str, Any] | None:
        """The state of this rank, None if there is none of any; the ranks agree on it."""
        saved, problem = None, None
        try:
            saved = self._read_own(comm.rank, comm.world)
        except Exception as error:  # the others must not wait: agree() raises it on every rank
            problem = f"cannot load {self.path(comm.rank)}: {type(error).__name__}: {error}"
        found = "nothing of oktopk" if saved is None else f"step {saved['step']}"
        agree(comm, {"what the checkpoint has": found}, problem)
        return saved

    def _read_own(self, rank: int, world: int) -> dict[str, Any] | None:
        own = self._read_if_there(rank)
        if own is not None and own["world"] == world:
            return own
        known = own or self._read_if_there(0)
        if known is None:
            return None
        if known["world"] == world:
            raise FileNotFoundError(
                "the checkpoint is not complete: resume from another one, or remove its files of oktopk"
            )
        return redistribute((self.read(self.path(old)) for old in range(known["world"])), rank, world)

    def _read_if_there(self, rank: int) -> dict[str, Any] | None:
        try:
            return self.read(self.path(rank))
        except FileNotFoundError:
            return None
