"""What is measured of a step, and what becomes of it over an epoch, a phase and all ranks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

_KIB = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere


@dataclass
class StepFigures:
    """One step on this rank, seconds by what they were spent on."""

    step: int
    epoch: int
    lr: float
    phase: str = ""
    loss: float | None = None
    """Mean over the ranks where it is finite."""
    samples: int = 0
    """Of those ranks."""
    skipped: bool = False
    gradient_norm: float | None = None
    """After averaging, before clipping; None where nothing is clipped."""
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    exposed_seconds: float = 0.0
    """Waiting for communication after backward."""
    update_seconds: float = 0.0
    step_seconds: float = 0.0

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        name = f"{what}_seconds"
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)


SECONDS = tuple(name for name in StepFigures.__dataclass_fields__ if name.endswith("_seconds"))
MEASURED = (
    *("sparsity", "compression_ratio", "payload_bytes", "target_density", "local_density", "global_density"),
    *("sent_bytes", "received_bytes", "hidden_share"),
)
"""Columns of flat_step whose averages are shown, one for each phase."""


@dataclass
class Sums:
    """Sums over steps, as plain numbers that a checkpoint can hold."""

    steps: int = 0
    skipped: int = 0
    loss: float = 0.0
    """Of the losses of all samples that were finite."""
    samples: float = 0.0
    amounts: dict[str, float] = field(default_factory=dict)

    def add(self, figures: StepFigures, row: Mapping[str, Any]) -> None:
        self.steps += 1
        self.skipped += figures.skipped
        self.loss += (figures.loss or 0.0) * figures.samples
        self.samples += figures.samples
        columns = {name: getattr(figures, name) for name in SECONDS}
        columns |= {name: row[name] for name in MEASURED if row[name] is not None}
        for name, value in columns.items():
            self.amounts[name] = self.amounts.get(name, 0.0) + float(value)

    def mean(self, name: str) -> float:
        return self.amounts.get(name, 0.0) / self.steps if self.steps else 0.0

    @property
    def mean_loss(self) -> float | None:
        return self.loss / self.samples if self.samples else None

    def row(self) -> dict[str, float | None]:
        means = {name: self.mean(name) for name in (*SECONDS, *MEASURED)}
        return {"steps": self.steps, "skipped": self.skipped, "loss": self.mean_loss, **means}


class Phases:
    """Sums for each phase, dense and sparse, that had a step."""

    def __init__(self, saved: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.sums = {phase: Sums(**sums) for phase, sums in (saved or {}).items()}

    def add(self, figures: StepFigures, row: Mapping[str, Any]) -> None:
        self.sums.setdefault(figures.phase, Sums()).add(figures, row)

    def state_dict(self) -> dict[str, Any]:
        return {phase: asdict(sums) for phase, sums in self.sums.items()}

    def rows(self) -> dict[str, dict[str, float | None]]:
        return {phase: sums.row() for phase, sums in self.sums.items()}

    @property
    def total(self) -> Sums:
        whole = Sums()
        for sums in self.sums.values():
            whole.steps += sums.steps
            whole.skipped += sums.skipped
            whole.loss += sums.loss
            whole.samples += sums.samples
            for name, amount in sums.amounts.items():
                whole.amounts[name] = whole.amounts.get(name, 0.0) + amount
        return whole


@dataclass(frozen=True)
class RankEpoch:
    """What a rank tells the others about its epoch: seconds per step, and memory."""

    compute_seconds: float
    data_seconds: float
    exposed_seconds: float
    step_seconds: float
    memory_bytes: int
    gpu_bytes: int
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """For each phase, the mean over its steps."""

    @staticmethod
    def of(phases: Phases) -> RankEpoch:
        sums = phases.total
        return RankEpoch(
            compute_seconds=sums.mean("forward_seconds") + sums.mean("backward_seconds"),
            data_seconds=sums.mean("data_seconds"),
            exposed_seconds=sums.mean("exposed_seconds"),
            step_seconds=sums.mean("step_seconds"),
            memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB,
            gpu_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            sent_bytes={phase: sums.mean("sent_bytes") for phase, sums in phases.sums.items()},
        )


@dataclass(frozen=True)
class EpochFigures:
    """An epoch over all ranks."""

    epoch: int
    steps: int
    skipped: int
    loss: float | None
    lr: float
    samples: int
    samples_per_second: float
    compute_seconds: float
    """Forward and backward, mean over ranks and steps."""
    data_seconds: float
    exposed_seconds: float
    step_seconds: float
    memory_bytes: int
    """The most that a rank has used so far."""
    gpu_bytes: int
    slowest_rank: int
    """The rank whose forward and backward took longest."""
    slowest_ratio: float
    """Its time over the mean."""
    sent_bytes: Mapping[str, Sequence[float]]
    """For each phase, what a step sent, rank by rank."""
    phases: Mapping[str, Mapping[str, float | None]]

    @staticmethod
    def of(epoch: int, lr: float, phases: Phases, ranks: Sequence[RankEpoch]) -> EpochFigures:
        whole = phases.total
        compute = [rank.compute_seconds for rank in ranks]
        mean = sum(compute) / len(ranks)
        slowest = max(range(len(ranks)), key=compute.__getitem__)
        elapsed = whole.amounts.get("step_seconds", 0.0)
        return EpochFigures(
            epoch=epoch,
            steps=whole.steps,
            skipped=whole.skipped,
            loss=whole.mean_loss,
            lr=lr,
            samples=round(whole.samples),
            samples_per_second=whole.samples / elapsed if elapsed else 0.0,
            compute_seconds=mean,
            data_seconds=sum(rank.data_seconds for rank in ranks) / len(ranks),
            exposed_seconds=sum(rank.exposed_seconds for rank in ranks) / len(ranks),
            step_seconds=max(rank.step_seconds for rank in ranks),
            memory_bytes=max(rank.memory_bytes for rank in ranks),
            gpu_bytes=max(rank.gpu_bytes for rank in ranks),
            slowest_rank=slowest,
            slowest_ratio=compute[slowest] / mean if mean else 1.0,
            sent_bytes={phase: [rank.sent_bytes.get(phase, 0.0) for rank in ranks] for phase in phases.sums},
            phases=phases.rows(),
        )
