"""Metrics of a step, summed over an epoch, a phase and all ranks."""

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
class StepMetrics:
    """One step on this rank; the seconds say where its time went."""

    step: int
    epoch: int
    lr: float
    phase: str = ""
    loss: float | None = None
    """Mean over the ranks with a finite loss."""
    samples: int = 0
    """Samples of the ranks with a finite loss."""
    skipped: bool = False
    gradient_norm: float | None = None
    """Before clipping, and after averaging unless updates are averaged; None without clipping."""
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    exposed_seconds: float = 0.0
    """Communication that the step waited for after backward."""
    update_seconds: float = 0.0
    step_seconds: float = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the duration of the block to `part`_seconds."""
        start = time.perf_counter()
        yield
        name = f"{part}_seconds"
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)


SECONDS = tuple(name for name in StepMetrics.__dataclass_fields__ if name.endswith("_seconds"))
REDUCER_COLUMNS = (
    *("sparsity", "compression_ratio", "payload_bytes", "target_density", "local_density", "global_density"),
    *("sent_bytes", "received_bytes", "hidden_share"),
)
"""Columns of flat_step that are averaged per phase."""


@dataclass
class MetricSums:
    """Sums over steps, as plain numbers that a checkpoint can hold."""

    steps: int = 0
    skipped: int = 0
    loss: float = 0.0
    """Sum of the finite losses over their samples."""
    samples: float = 0.0
    amounts: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: StepMetrics, row: Mapping[str, Any]) -> None:
        """Add a step; `row` has the reducer's columns, from flat_step."""
        self.steps += 1
        self.skipped += metrics.skipped
        self.loss += (metrics.loss or 0.0) * metrics.samples
        self.samples += metrics.samples
        columns = {name: getattr(metrics, name) for name in SECONDS}
        columns |= {name: row[name] for name in REDUCER_COLUMNS if row[name] is not None}
        for name, value in columns.items():
            self.amounts[name] = self.amounts.get(name, 0.0) + float(value)

    def mean(self, name: str) -> float:
        return self.amounts.get(name, 0.0) / self.steps if self.steps else 0.0

    @property
    def mean_loss(self) -> float | None:
        return self.loss / self.samples if self.samples else None

    def row(self) -> dict[str, float | None]:
        means = {name: self.mean(name) for name in (*SECONDS, *REDUCER_COLUMNS)}
        return {"steps": self.steps, "skipped": self.skipped, "loss": self.mean_loss, **means}


class PhaseMetrics:
    """MetricSums for each phase, dense and sparse, that has had a step."""

    def __init__(self, saved: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.sums = {phase: MetricSums(**sums) for phase, sums in (saved or {}).items()}

    def add(self, metrics: StepMetrics, row: Mapping[str, Any]) -> None:
        self.sums.setdefault(metrics.phase, MetricSums()).add(metrics, row)

    def state_dict(self) -> dict[str, Any]:
        return {phase: asdict(sums) for phase, sums in self.sums.items()}

    def rows(self) -> dict[str, dict[str, float | None]]:
        return {phase: sums.row() for phase, sums in self.sums.items()}

    @property
    def total(self) -> MetricSums:
        whole = MetricSums()
        for sums in self.sums.values():
            whole.steps += sums.steps
            whole.skipped += sums.skipped
            whole.loss += sums.loss
            whole.samples += sums.samples
            for name, amount in sums.amounts.items():
                whole.amounts[name] = whole.amounts.get(name, 0.0) + amount
        return whole


@dataclass(frozen=True)
class RankMetrics:
    """A rank's epoch, as sent to the other ranks: seconds per step, and memory."""

    compute_seconds: float
    data_seconds: float
    exposed_seconds: float
    step_seconds: float
    memory_bytes: int
    gpu_bytes: int
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Mean per step, by phase."""

    @staticmethod
    def of(phases: PhaseMetrics) -> RankMetrics:
        sums = phases.total
        return RankMetrics(
            compute_seconds=sums.mean("forward_seconds") + sums.mean("backward_seconds"),
            data_seconds=sums.mean("data_seconds"),
            exposed_seconds=sums.mean("exposed_seconds"),
            step_seconds=sums.mean("step_seconds"),
            memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB,
            gpu_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            sent_bytes={phase: sums.mean("sent_bytes") for phase, sums in phases.sums.items()},
        )


@dataclass(frozen=True)
class EpochMetrics:
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
    """Peak over all ranks so far."""
    gpu_bytes: int
    slowest_rank: int
    """The rank with the longest forward and backward."""
    slowest_ratio: float
    """Its time over the mean."""
    sent_bytes: Mapping[str, Sequence[float]]
    """Mean per step of each rank, by phase."""
    phases: Mapping[str, Mapping[str, float | None]]

    @staticmethod
    def of(epoch: int, lr: float, phases: PhaseMetrics, ranks: Sequence[RankMetrics]) -> EpochMetrics:
        whole = phases.total
        compute = [rank.compute_seconds for rank in ranks]
        mean = sum(compute) / len(ranks)
        slowest = max(range(len(ranks)), key=compute.__getitem__)
        elapsed = whole.amounts.get("step_seconds", 0.0)
        return EpochMetrics(
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
