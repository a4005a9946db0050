"""The interface between workloads and the training loop. Each workload is one file in this folder."""

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
class Shard:
    """This rank's part of the work: batches of `batch` samples, `nsteps` of them per step."""

    rank: int = 0
    world: int = 1
    batch: int = 8
    nsteps: int = 1
    seed: int = 0


@dataclass(frozen=True)
class DataSource:
    """Where the data comes from. Without a folder it is generated, always the same."""

    folder: Path | None = None
    min_seconds: float = 0.0
    augment: bool = True


@dataclass(frozen=True)
class StepPosition:
    """The position of a step in the run: the input of a learning rate schedule."""

    epoch: int
    step: int
    """Counted from the start of the run."""
    steps_per_epoch: int
    total_steps: int
    world: int


@dataclass
class Tally:
    """Sums over the validation samples, which add up over ranks, and a few samples to show."""

    sums: dict[str, float] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount


class Task(ABC, Generic[Batch]):
    """A model and its data on one rank."""

    model: nn.Module
    steps_per_epoch: int
    embedded: bool
    """Whether the data is generated."""
    data: str
    """A short description of the data for the log, like "897 + 130 utterances of /data/an4"."""
    metric: str
    """The validation metric to compare runs by: a key of `metrics()`."""
    problems: Sequence[object] = ()
    """Samples that were left out; str() of each is one line."""

    @abstractmethod
    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of the epoch, nsteps per step, starting at `first_step`.

        They are a function of the seed, the epoch and the step.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Compute the mean loss over the samples of a batch; the caller sets train or eval mode."""

    def samples(self, batch: Batch) -> int:
        """Number of samples in a batch."""
        return len(batch)  # type: ignore[arg-type]

    @abstractmethod
    def validate(self) -> Tally:
        """Validate on this rank's shard; the model is in eval mode, without gradients.

        The sums contain at least "loss" and "samples".
        """

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute the validation metrics from the sums over all ranks, "val loss" first.

        A rate with a zero denominator is left out.
        """

    def state_dict(self) -> dict[str, Any]:
        """State besides the model that a rank needs to resume within an epoch: tensors and primitives."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Workload:
    """A workload: its --dnn name, how to build its task, and its default options."""

    dnn: str
    dataset: str
    build: Callable[[DataSource, Shard], Task[Any]]
    batch_size: int
    max_epochs: int
    schedule: Callable[[float, StepPosition], float]
    """Computes the learning rate of a step from --lr."""
    optimizer: Callable[..., Optimizer]
    """Called with the parameters, lr, weight_decay and, unless `momentum` is None, momentum."""
    momentum: float | None = 0.9
    """None for an optimizer without momentum."""
    weight_decay: float = 1e-4
    clip: float | None = None
    """Clip the averaged gradient to this norm."""
