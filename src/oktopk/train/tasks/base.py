"""What the training loop asks of a workload. A workload is one file in this folder: see oktopk.train.tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Share:
    """Which part of the work is this rank's: batches of `batch` samples, `nsteps` of them for a step."""

    rank: int = 0
    world: int = 1
    batch: int = 8
    nsteps: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Source:
    """Where data comes from. Without a folder it is embedded: generated, always the same."""

    folder: Path | None = None
    min_seconds: float = 0.0
    augment: bool = True


@dataclass(frozen=True)
class Clock:
    """Where in a run a step is: what a schedule of the learning rate depends on."""

    epoch: int
    step: int
    """Since the run began."""
    steps_per_epoch: int
    total_steps: int
    world: int


@dataclass
class Tally:
    """Sums over the samples of a validation, which add up over ranks. Some samples are kept to be looked at."""

    sums: dict[str, float] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount


class Task(ABC, Generic[Batch]):
    """A network and its data on one rank, for one run."""

    model: nn.Module
    steps_per_epoch: int
    embedded: bool
    """Whether the data is the embedded one."""
    data: str
    """What the data is, in a few words for the log: "897 + 130 utterances of /data/an4"."""
    metric: str
    """The figure of a validation to compare runs by, one of the names that `figures` gives."""
    problems: Sequence[object] = ()
    """What was wrong with the data and left out; each has a line as str()."""

    @abstractmethod
    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of the epoch, nsteps for each step, from the given step on: a function of the
        seed, the epoch and the step."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The mean over the samples of a batch, of the model as it is (train or eval mode)."""

    def samples(self, batch: Batch) -> int:
        """How many samples a batch has."""
        return len(batch)  # type: ignore[arg-type]

    @abstractmethod
    def validate(self) -> Tally:
        """This rank's share of the validation data; the model is in eval mode and no gradients are recorded.
        `sums` has "loss" and "samples" at least."""

    @abstractmethod
    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What a validation says, from the sums over all ranks; "val loss" first. A rate whose denominator is
        zero is left out."""

    def state_dict(self) -> dict[str, Any]:
        """What a rank must keep besides the model to go on in the middle of an epoch: tensors and primitives."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Workload:
    """A name for the command line, and how to make its task. What stands here was the original's, and any of
    it can be set for a run."""

    dnn: str
    dataset: str
    build: Callable[[Source, Share], Task[Any]]
    batch_size: int
    max_epochs: int
    schedule: Callable[[float, Clock], float]
    """The learning rate of a step, from the one that was asked for."""
    optimizer: Callable[..., Optimizer]
    """Called with the parameters, lr, weight_decay and, if it has one, momentum."""
    momentum: float | None = 0.9
    """None for an optimizer that has none."""
    weight_decay: float = 1e-4
    clip: float | None = None
    """The largest norm of the averaged gradient."""
