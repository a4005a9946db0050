"""The training loop: one rank's, from the first step to the last."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from signal import Signals
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from oktopk import DistributedOptimizer
from oktopk.comm import Communicator, gather_json
from oktopk.metrics.events import SPARSE, StepEvent
from oktopk.metrics.sinks import flat_step

from .checkpoint.replicas import Buffers, average_buffers, check_replicas
from .checkpoint.snapshot import Snapshot
from .checkpoint.state import as_state_of_a_run, restore, state_of
from .checkpoint.storage import Checkpoints
from .config.options import TrainConfig
from .config.plan import Plan
from .figures import EpochFigures, Phases, RankEpoch, StepFigures
from .folder import RunFolder
from .prefetch import prefetched
from .screen import Bar, say_epoch, say_transition, say_validation
from .stop import Stop
from .tasks import Clock, Task

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Progress:
    """How far a run is: `step` steps are done, of which `in_epoch` belong to an epoch that is not finished."""

    epoch: int = 0
    in_epoch: int = 0
    step: int = 0
    summarised: int = 0
    """So many steps were done at the last summary."""


class Trainer:
    """fit() trains. `sparsities`, `compression_ratios` and `communication_sizes` have an entry for each step of
    the epoch; whoever calls has linked them by optimizer.set_trainer(trainer)."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task[Any],
        optimizer: DistributedOptimizer,
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
        self.in_epoch, self.in_run = Phases(), Phases()
        self.validations: list[dict[str, float]] = []
        self._buffers = Buffers(task.model)
        self._chief = optimizer.reducer.rank == 0
        self._ended_by: Signals | None = None

    # The run.

    def fit(self) -> Signals | None:
        """Train to the end of the plan. If a signal has ended it before, the run is saved, and it is returned."""
        self._bar = Bar(self.done.step, self.to_go, self._chief)
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
    def to_go(self) -> int:
        """Steps until the end of the run."""
        left = (self.plan.max_epochs - self.done.epoch) * self.plan.steps_per_epoch - self.done.in_epoch
        return min(left, self._steps_to_max())

    def _steps_to_max(self) -> int:
        most = self.plan.max_steps
        return sys.maxsize if most is None else max(0, most - self.done.step)

    def train_epoch(self) -> None:
        """From where the epoch stands to its end, or to that of the run."""
        self.model.train()
        batches = prefetched(self.task.batches(self.done.epoch, self.done.in_epoch))
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
        """Whether a rank has been asked to stop."""
        figures = StepFigures(self.done.step, self.done.epoch, self._set_lr())
        start = perf_counter()
        self._buffers.keep()
        self.optimizer.zero_grad()
        total, samples = 0.0, 0
        for _ in range(self.config.nsteps_update):
            with figures.spent_on("data"):
                batch = next(batches)
            with figures.spent_on("forward"):
                loss = self.task.loss(batch)
            with figures.spent_on("backward"):
                spoiled_if_not_finite(loss / self.config.nsteps_update).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * self.task.samples(batch)
            samples += self.task.samples(batch)
        with figures.spent_on("exposed"):
            event = self.optimizer.synchronize()
        with figures.spent_on("update"):
            self._update(figures, event)
        with figures.spent_on("exposed"):
            stop_asked = self._share(figures, total, samples)
        figures.step_seconds = perf_counter() - start
        self._note(figures, event)
        return stop_asked

    def _set_lr(self) -> float:
        lr = self._lr_at(self.done.epoch, self.done.in_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _lr_at(self, epoch: int, in_epoch: int) -> float:
        per_epoch = self.plan.steps_per_epoch
        clock = Clock(epoch, epoch * per_epoch + in_epoch, per_epoch, self.plan.steps, self.plan.world)
        return self.config.workload.schedule(self.config.lr, clock)

    def _update(self, figures: StepFigures, event: StepEvent) -> None:
        figures.phase, figures.skipped = event.phase, event.skipped
        if event.skipped:
            self._buffers.restore()  # the same forward pass may have spoiled the running statistics
        elif self.config.clip is not None:
            figures.gradient_norm = float(clip_grad_norm_(self.model.parameters(), self.config.clip))
        self.optimizer.step()

    def _share(self, figures: StepFigures, total: float, samples: int) -> bool:
        """The loss over all ranks, and whether one of them was asked to stop: all end after the same step."""
        finite = math.isfinite(total)
        said = torch.tensor([total if finite else 0.0, samples if finite else 0, self.stop.signal is not None])
        self._talk(lambda comm: comm.all_reduce_(said, "loss", control=True))
        loss, count, asked = said.tolist()
        figures.loss, figures.samples = loss / count if count else None, round(count)
        return bool(asked)

    def _note(self, figures: StepFigures, event: StepEvent) -> None:
        row = flat_step(event)
        if self._chief and event.phase == SPARSE and SPARSE not in self.in_run.sums:
            say_transition(figures, self.plan, event.target_density)
        self.in_epoch.add(figures, row)
        self.in_run.add(figures, row)
        self.folder.step(figures, row)
        self._bar.update(figures, event, self.in_epoch)
        self.done.step += 1
        self.done.in_epoch += 1

    # The end of an epoch.

    def end_epoch(self) -> None:
        """Also of a part that max_steps has cut short; a longer run can go on in the middle of the epoch."""
        epoch = self.done.epoch
        cut_short = self.done.in_epoch < self.plan.steps_per_epoch
        last = cut_short or epoch + 1 >= self.plan.max_epochs or self._steps_to_max() == 0
        self._buffers.keep()
        self._talk(lambda comm: check_replicas(comm, self.model, f"epoch {epoch}"))
        self._talk(lambda comm: average_buffers(comm, self.model))
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
        self.in_epoch = Phases()
        for entries in self._lists:
            entries.clear()

    def summarise(self, epoch: int) -> None:
        mine = asdict(RankEpoch.of(self.in_epoch))
        ranks = [RankEpoch(**said) for said in self._ask(lambda comm: gather_json(comm, mine, "epoch"))]
        figures = EpochFigures.of(epoch, self._lr_at(epoch, self.done.in_epoch - 1), self.in_epoch, ranks)
        self.folder.record("epoch", self.done.step, asdict(figures))
        if self._chief:
            say_epoch(figures, self._lr_at(epoch + 1, 0))

    @torch.no_grad()
    def validate(self, epoch: int) -> None:
        """Every sample of the validation data once, shared over the ranks."""
        self.model.eval()
        tally = self.task.validate()
        self.model.train()
        heard = self._ask(lambda comm: gather_json(comm, tally.sums, "validation"))
        sums: dict[str, float] = {}
        for said in heard:
            for name, amount in said.items():
                sums[name] = sums.get(name, 0.0) + amount
        figures = self.task.figures(sums)
        if self.config.pseudo_accuracy and "val WER" in figures:
            figures["pseudo-accuracy"] = max(0.0, 1.0 - figures["val WER"])
        self.validations.append({"epoch": epoch, "step": self.done.step, **figures})
        self.folder.record("validation", self.done.step, {"epoch": epoch, **figures})
        if self._chief:
            say_validation(epoch, figures, tally.shown)

    # Checkpoints.

    def save(self) -> None:
        snapshot = self.snapshot()
        self._talk(lambda comm: self.checkpoints.save(comm, snapshot))

    def snapshot(self) -> Snapshot:
        shared, own = state_of(self.task, self.optimizer)
        shared |= {
            "progress": asdict(self.done),
            "batch": self._global_batch,
            "validations": self.validations,
            "run": self.in_run.state_dict(),
        }
        own |= {
            "epoch": self.in_epoch.state_dict(),
            "lists": [list(entries) for entries in self._lists],
        }
        return Snapshot(self.done.step, self.done.epoch, shared, own)

    def resume(self) -> None:
        """Go on from the newest checkpoint that all ranks can read, to the bit if there are as many as before;
        from the beginning if there is none yet."""
        if self._ask(self.checkpoints.newest) is None:
            return
        found: Snapshot = self._ask(self.checkpoints.load)
        with as_state_of_a_run(found.step):
            self._take_over(found.shared, found.own)
        if self._chief:
            where = f"going on after step {self.done.step}, in epoch {self.done.epoch}"
            log.info("%s: %d steps to go", where, 0 if self.finished else self.to_go)

    def _take_over(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        restore(self.task, self.optimizer, shared, own)
        self._set_options()
        self.done = self._rescaled(Progress(**shared["progress"]), shared["batch"])
        self.validations = list(shared["validations"])
        self.in_run = Phases(shared["run"])
        if own["epoch"] is not None:  # otherwise another number of ranks had saved it
            self.in_epoch = Phases(own["epoch"])
            for entries, saved in zip(self._lists, own["lists"], strict=True):
                entries[:] = saved

    def _set_options(self) -> None:
        """Those of now, where they differ from those that were saved; the learning rate is set in every step."""
        options = {"momentum": self.config.momentum_after, "weight_decay": self.config.weight_decay}
        for group in self.optimizer.param_groups:
            group |= {name: value for name, value in options.items() if name in group}

    @property
    def _lists(self) -> tuple[list[float], ...]:
        return self.sparsities, self.compression_ratios, self.communication_sizes

    @property
    def _global_batch(self) -> int:
        size = self.config.batch_size
        assert size is not None
        return size * self.config.nsteps_update * self.plan.world

    def _rescaled(self, done: Progress, batch: int) -> Progress:
        """With other global batches, the same part of the epoch is behind us."""
        if batch == self._global_batch:
            return done
        return replace(done, in_epoch=done.in_epoch * batch // self._global_batch)

    # The other ranks.

    def _talk(self, job: Callable[[Communicator], None]) -> None:
        self.optimizer.reducer.run(job)

    def _ask(self, job: Callable[[Communicator], T]) -> T:
        answers: list[T] = []
        self._talk(lambda comm: answers.append(job(comm)))
        return answers[0]


def spoiled_if_not_finite(loss: Tensor) -> Tensor:
    """A loss that is not finite may have gradients that are: then make them so, for all ranks to skip the step."""
    return loss if bool(torch.isfinite(loss)) else loss * math.nan
