"""The training loop of one rank, from the first step to the last."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from signal import Signals
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from oktopk import LocalOptimizer
from oktopk.comm import Communicator, gather_json
from oktopk.metrics.events import SPARSE, StepEvent
from oktopk.metrics.sinks import flat_step

from .checkpoint.replicas import BufferBackup, average_buffers, check_replicas
from .checkpoint.snapshot import Snapshot
from .checkpoint.state import capture_state, explain_bad_state, restore_state
from .checkpoint.storage import Checkpoints
from .config.options import TrainConfig
from .config.plan import Plan
from .console import ProgressBar, log_epoch, log_transition, log_validation
from .metrics import EpochMetrics, PhaseMetrics, RankMetrics, StepMetrics
from .prefetch import prefetch
from .rehearsal import AnyOptimizer
from .run_folder import RunFolder
from .sharded import ShardedOptimizer, gather, gathered
from .stop import Stop
from .tasks import StepPosition, Task

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Progress:
    """How far a run is: `step` steps are done, `in_epoch` of them in the current epoch."""

    epoch: int = 0
    in_epoch: int = 0
    step: int = 0
    summarised: int = 0
    """Steps done at the last epoch summary."""


class Trainer:
    """Trains a task; call fit().

    `sparsities`, `compression_ratios` and `communication_sizes` have one entry per step of the current epoch, once
    the caller has linked them with optimizer.set_trainer(trainer).
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task[Any],
        optimizer: AnyOptimizer,
        plan: Plan,
        folder: RunFolder,
        checkpoints: Checkpoints,
        stop: Stop,
    ) -> None:
        self.config, self.task, self.model, self.optimizer = config, task, task.model, optimizer
        self.plan, self.folder, self.checkpoints, self.stop = plan, folder, checkpoints, stop
        self.sparsities: list[float] = []
        self.compression_ratios: list[float] = []
        self.communication_sizes: list[float] = []
        self.done = Progress()
        self.in_epoch, self.in_run = PhaseMetrics(), PhaseMetrics()
        self.validations: list[dict[str, float]] = []
        self._buffers = BufferBackup(task.model)
        self._is_rank0 = self._run(lambda comm: comm.rank) == 0
        self._ended_by: Signals | None = None

    # The run.

    def fit(self) -> Signals | None:
        """Train to the end of the plan. If a signal stops the run, save it and return the signal."""
        self._bar = ProgressBar(self.done.step, self.remaining, self._is_rank0)
        try:
            while not self.finished and self._ended_by is None:
                self.train_epoch()
        finally:
            self._bar.close()
        return self._ended_by

    @property
    def finished(self) -> bool:
        cut_short = self._steps_to_max() == 0 and self.done.summarised == self.done.step
        return self.done.epoch >= self.plan.max_epochs or cut_short

    @property
    def remaining(self) -> int:
        """Steps until the end of the run."""
        left = (self.plan.max_epochs - self.done.epoch) * self.plan.steps_per_epoch - self.done.in_epoch
        return min(left, self._steps_to_max())

    def _steps_to_max(self) -> int:
        most = self.plan.max_steps
        return sys.maxsize if most is None else max(0, most - self.done.step)

    def train_epoch(self) -> None:
        """Train the rest of the epoch, or of the run."""
        self.model.train()
        batches = prefetch(self.task.batches(self.done.epoch, self.done.in_epoch))
        try:
            for _ in range(min(self.plan.steps_per_epoch - self.done.in_epoch, self._steps_to_max())):
                if self.train_step(batches):
                    self._ended_by = self.stop.signal or Signals.SIGTERM
                    return self.save()
                if self.config.save_every and self.done.step % self.config.save_every == 0:
                    self.save()
        finally:
            batches.close()  # type: ignore[attr-defined]
        self.end_epoch()
        return None

    def train_step(self, batches: Iterator[Any]) -> bool:
        """Train one step; returns whether a rank was asked to stop."""
        metrics = StepMetrics(self.done.step, self.done.epoch, self._set_lr())
        start = perf_counter()
        self._buffers.save()
        self.optimizer.zero_grad()
        total, samples = 0.0, 0
        for left in reversed(range(self.config.nsteps_update)):
            with metrics.measure("data"):
                batch = next(batches)
            with metrics.measure("forward"):
                loss = self.task.loss(batch)
            with metrics.measure("backward"), self._accumulating(left > 0):
                poison_if_nonfinite(loss / self.config.nsteps_update).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * self.task.samples(batch)
            samples += self.task.samples(batch)
        event = self._update(metrics)
        with metrics.measure("exposed"):
            stop_requested = self._sync_loss(metrics, total, samples)
        metrics.step_seconds = perf_counter() - start
        self._record(metrics, event)
        return stop_requested

    def _accumulating(self, more: bool) -> AbstractContextManager[None]:
        """A block for a backward pass, and whether there are more in this step."""
        if more and isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.accumulating()
        return nullcontext()

    def _set_lr(self) -> float:
        lr = self._lr_at(self.done.epoch, self.done.in_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _lr_at(self, epoch: int, in_epoch: int) -> float:
        per_epoch = self.plan.steps_per_epoch
        position = StepPosition(epoch, epoch * per_epoch + in_epoch, per_epoch, self.plan.steps, self.plan.world)
        return self.config.schedule(self.config.lr, position)

    def _update(self, metrics: StepMetrics) -> StepEvent:
        """Average and step."""
        if isinstance(self.optimizer, LocalOptimizer):
            event = self._update_locally(metrics, self.optimizer)
        else:
            with metrics.measure("exposed"):
                event = self.optimizer.synchronize()
            if isinstance(self.optimizer, ShardedOptimizer):  # has waited at the end of backward
                metrics.backward_seconds -= event.exposed
                metrics.exposed_seconds += event.exposed
            with metrics.measure("update"):
                if not event.skipped:
                    self._clip(metrics, self.config.clip)
                self.optimizer.step()
        metrics.phase, metrics.skipped = event.phase, event.skipped
        if event.skipped:
            self._buffers.restore()  # the forward pass may have made the running statistics non-finite
        return event

    def _update_locally(self, metrics: StepMetrics, optimizer: LocalOptimizer) -> StepEvent:
        """Step with this rank's gradient, clipped by both norms; the optimizer averages what it has added."""
        with metrics.measure("update"):
            self._clip(metrics, min((c for c in (self.config.clip, self.config.norm_clip) if c), default=None))
            optimizer.step()
        event = optimizer.last
        assert event is not None
        metrics.update_seconds -= event.exposed
        metrics.exposed_seconds += event.exposed
        return event

    def _clip(self, metrics: StepMetrics, most: float | None) -> None:
        if most is not None:
            norm = float(gather(clip_grad_norm_(self.model.parameters(), most)))
            metrics.gradient_norm = norm if math.isfinite(norm) else None

    def _sync_loss(self, metrics: StepMetrics, total: float, samples: int) -> bool:
        """Average the loss over all ranks; returns whether any rank was asked to stop."""
        finite = math.isfinite(total)
        values = torch.tensor([total if finite else 0.0, samples if finite else 0, self.stop.signal is not None])
        self._run(lambda comm: comm.all_reduce_(values, "loss", control=True))
        loss, count, stops = values.tolist()
        metrics.loss, metrics.samples = loss / count if count else None, round(count)
        return bool(stops)

    def _record(self, metrics: StepMetrics, event: StepEvent) -> None:
        row = flat_step(event)
        if self._is_rank0 and event.phase == SPARSE and SPARSE not in self.in_run.sums:
            log_transition(metrics, self.plan, event.target_density)
        self.in_epoch.add(metrics, row)
        self.in_run.add(metrics, row)
        self.folder.write_step(metrics, row)
        self._bar.update(metrics, event, self.in_epoch)
        self.done.step += 1
        self.done.in_epoch += 1

    # The end of an epoch.

    def end_epoch(self) -> None:
        """Summarise, validate and save; also if max_steps cut the epoch short, where a longer run may resume."""
        epoch = self.done.epoch
        cut_short = self.done.in_epoch < self.plan.steps_per_epoch
        last = cut_short or epoch + 1 >= self.plan.max_epochs or self._steps_to_max() == 0
        self._buffers.save()
        self._synchronize()
        self._run(lambda comm: check_replicas(comm, self.model, f"epoch {epoch}", self.config.shard))
        self._run(lambda comm: average_buffers(comm, self.model))
        self.summarise(epoch)
        if last or epoch == 0 or (epoch + 1) % self.config.val_every == 0:
            self.validate(epoch)
        self.done.summarised = self.done.step
        if cut_short:
            self._buffers.restore()
        else:
            self._next_epoch()
        self.save()

    def _next_epoch(self) -> None:
        self.done.epoch, self.done.in_epoch = self.done.epoch + 1, 0
        self.in_epoch = PhaseMetrics()
        for entries in self._step_lists:
            entries.clear()

    def summarise(self, epoch: int) -> None:
        own = asdict(RankMetrics.of(self.in_epoch))
        ranks = [RankMetrics(**row) for row in self._run(lambda comm: gather_json(comm, own, "epoch"))]
        metrics = EpochMetrics.of(epoch, self._lr_at(epoch, self.done.in_epoch - 1), self.in_epoch, ranks)
        self.folder.record("epoch", self.done.step, asdict(metrics))
        if self._is_rank0:
            log_epoch(metrics, self._lr_at(epoch + 1, 0), self.plan)

    @torch.no_grad()
    def validate(self, epoch: int) -> None:
        """Validate on every sample once, sharded over the ranks."""
        self.model.eval()
        with gathered(self.model):
            tally = self.task.validate()
        self.model.train()
        tallies = self._run(lambda comm: gather_json(comm, tally.sums, "validation"))
        sums: dict[str, float] = {}
        for rank_sums in tallies:
            for name, amount in rank_sums.items():
                sums[name] = sums.get(name, 0.0) + amount
        metrics = self.task.metrics(sums)
        if self.config.pseudo_accuracy and "val WER" in metrics:
            metrics["pseudo-accuracy"] = max(0.0, 1.0 - metrics["val WER"])
        self.validations.append({"epoch": epoch, "step": self.done.step, **metrics})
        self.folder.record("validation", self.done.step, {"epoch": epoch, **metrics})
        if self._is_rank0:
            log_validation(epoch, metrics, tally.shown)

    # Checkpoints.

    def save(self) -> None:
        self._synchronize()
        snapshot = self.snapshot()
        self._run(lambda comm: self.checkpoints.save(comm, snapshot))
        self._localize()

    def _synchronize(self) -> None:
        """Give all ranks the same parameters, to validate and to save."""
        if isinstance(self.optimizer, LocalOptimizer):
            self.optimizer.synchronize()

    def _localize(self) -> None:
        """Go on as if nothing had been saved, unless this is the end."""
        if isinstance(self.optimizer, LocalOptimizer) and not self.finished:
            self.optimizer.localize()

    def snapshot(self) -> Snapshot:
        shared, own = capture_state(self.task, self.optimizer)
        shared |= {
            "progress": asdict(self.done),
            "batch": self._global_batch,
            "validations": self.validations,
            "run": self.in_run.state_dict(),
        }
        own |= {
            "epoch": self.in_epoch.state_dict(),
            "lists": [list(entries) for entries in self._step_lists],
        }
        return Snapshot(self.done.step, self.done.epoch, shared, own)

    def resume(self) -> None:
        """Resume from the newest checkpoint that all ranks can read, or start at step 0 if there is none.

        With the same number of ranks the run continues bit for bit.
        """
        if self._run(self.checkpoints.newest) is None:
            return
        found: Snapshot = self._run(self.checkpoints.load)
        with explain_bad_state(found.step):
            self._restore(found.shared, found.own)
        self._localize()
        if self._is_rank0:
            where = f"resuming after step {self.done.step}, in epoch {self.done.epoch}"
            log.info("%s: %d steps left", where, 0 if self.finished else self.remaining)

    def _restore(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        options = [_own_options(group) for group in self.optimizer.param_groups]
        restore_state(self.task, self.optimizer, shared, own)
        for group, given in zip(self.optimizer.param_groups, options, strict=True):
            group |= given  # this run's, not the saved ones; every step sets the learning rate
        self.done = self._rescale(Progress(**shared["progress"]), shared["batch"])
        self.validations = list(shared["validations"])
        self.in_run = PhaseMetrics(shared["run"])
        if own["epoch"] is not None:  # None if another number of ranks saved it
            self.in_epoch = PhaseMetrics(own["epoch"])
            for entries, saved in zip(self._step_lists, own["lists"], strict=True):
                entries[:] = saved

    @property
    def _step_lists(self) -> tuple[list[float], ...]:
        return self.sparsities, self.compression_ratios, self.communication_sizes

    @property
    def _global_batch(self) -> int:
        size = self.config.batch_size
        assert size is not None
        return size * self.config.nsteps_update * self.plan.world

    def _rescale(self, done: Progress, batch: int) -> Progress:
        """With another global batch size, keep the same share of the epoch."""
        if batch == self._global_batch:
            return done
        return replace(done, in_epoch=done.in_epoch * batch // self._global_batch)

    # The other ranks.

    def _run(self, job: Callable[[Communicator], T]) -> T:
        """Run a collective on the engine's thread, and return its result."""
        return self.optimizer.run(job)


def poison_if_nonfinite(loss: Tensor) -> Tensor:
    """A non-finite loss can have finite gradients: make them NaN too, so that all ranks skip the step."""
    return loss if bool(torch.isfinite(loss)) else loss * math.nan


def _own_options(group: dict[str, Any]) -> dict[str, Any]:
    """What the command line sets for a group of parameters."""
    return {name: group[name] for name in ("momentum", "weight_decay") if name in group}
