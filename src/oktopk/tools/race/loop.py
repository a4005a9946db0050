"""The training loop of a cell on one rank.

The clock is the sum of the steps, each as long as on its slowest rank: waiting for data, forward, backward,
exchange, clipping and optimizer. The ranks compare their times after every step, off the clock, so that
all of them stop at the same step. Validation, checkpoints and compilation are off the clock, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.comm import Communicator, gather_json
from oktopk.kernels import must_compile
from oktopk.tools.lab.hosts import interface_sent_bytes
from oktopk.train.building import build_optimizer, build_task
from oktopk.train.checkpoint.replicas import BufferBackup, average_buffers, check_replicas
from oktopk.train.checkpoint.snapshot import ModelIdentity, Snapshot
from oktopk.train.checkpoint.state import capture_state, restore_state
from oktopk.train.checkpoint.storage import Checkpoints
from oktopk.train.config.options import TrainConfig
from oktopk.train.prefetch import prefetch
from oktopk.train.tasks import StepPosition

from .attach import attach, compiles, rehearse
from .cells import COMPILING, CellFolder, Point, Step, finite
from .contenders import Contender, parse_contender
from .links import needs_lab, pause_seconds
from .spec import TIMING, RaceError, Spec

TIMED_WARMUP = 12
"""Dense steps of a timing cell, of which the first ones are not counted."""
_SAY_SECONDS = 0.5


def make_config(spec: Spec) -> TrainConfig:
    """The trainer's options of a cell."""
    paths = {item.name for item in fields(TrainConfig) if "Path" in str(item.type)}
    known: dict[str, Any] = {
        name: Path(value) if name in paths and value is not None else value
        for name, value in spec.race.config.items()
    }
    return TrainConfig(**{**known, "seed": spec.cell.seed})


@dataclass
class Progress:
    """How far a cell is; the same on all ranks."""

    epoch: int = 0
    in_epoch: int = 0
    step: int = 0
    clock: float = 0.0
    sent_bytes: float = 0.0
    saved_at: float = 0.0
    """The clock of the last checkpoint."""


@dataclass(frozen=True)
class _Trained:
    """One step on this rank."""

    seconds: float
    loss: float
    sent_bytes: float
    """Metered or modelled, by the contender."""
    counter: int | None
    """Bytes that the interface of a host in a lab had sent before the step."""


class CellLoop:
    """Trains one cell; call run() on all ranks together.

    Args:
        spec: what the cell does.
        folder: where rank 0 writes.
        comm: the ranks, over connections that no contender uses.
    """

    def __init__(self, spec: Spec, folder: CellFolder, comm: Communicator) -> None:
        self.spec, self.race, self.folder, self.comm = spec, spec.race, folder, comm
        self.timing = spec.cell.kind == TIMING
        self.contender = _contender(spec)
        config = make_config(spec)
        corrects = bool(self.contender.options.get("momentum"))
        passes = self.contender.passes * config.nsteps_update
        self.config = replace(config, momentum_correction=corrects, nsteps_update=passes)
        self.task = build_task(self.config, comm.rank, comm.world)
        self.network: nn.Module = self.task.model
        self.done = Progress()
        self._losses: list[float] = []
        self._said = 0.0
        self._last: Point | None = None
        assert config.max_epochs is not None
        self.limit = self.race.steps or self.task.steps_per_epoch * config.max_epochs
        if self.timing:
            settings = self.contender.settings
            ramp = (settings.ramp_steps or 0) if settings else 0
            self.limit = self.contender.warmup_steps + ramp + self.race.timing_steps

    def run(self) -> dict[str, Any]:
        """Train to the end of the cell, or resume it; returns its result."""
        if compiles(self.contender):
            if must_compile():
                self._say(COMPILING)
            rehearse(self.contender, self.network)
        self.attached = attach(self.contender, self.network, build_optimizer(self.config, self.network))
        self._buffers = BufferBackup(self.network)
        identity = ModelIdentity.of(self.config.dnn, self.network)
        self._checkpoints = Checkpoints(self.folder.checkpoints, identity, keep=1)
        try:
            self._resume()
            if self.comm.rank == 0:
                self.folder.open(self.done.step)
            ended = self._train()
        finally:
            self.attached.close()
            self.folder.close()
        result = self._result(ended)
        if self.comm.rank == 0:
            self.folder.finish(result)
        return result

    def _train(self) -> str:
        """Train until something ends the cell; returns what."""
        ended = None if self.timing or self.done.step else self._validate()
        while ended is None:
            batches = prefetch(self.task.batches(self.done.epoch, self.done.in_epoch))
            try:
                while ended is None and self.done.in_epoch < self.task.steps_per_epoch:
                    ended = self._step_and_judge(batches)
            finally:
                batches.close()  # type: ignore[attr-defined]
            if self.done.in_epoch == self.task.steps_per_epoch:
                self.done.epoch, self.done.in_epoch = self.done.epoch + 1, 0
        return ended

    def _step_and_judge(self, batches: Iterator[Any]) -> str | None:
        self._record(self._step(batches))
        ended = self._at_limit()
        if not self.timing and (ended or self.done.step % self.race.val_every == 0):
            ended = self._validate() or ended
        if ended is None and self.attached.resumable and self._save_due():
            self._save()
        return ended

    def _step(self, batches: Iterator[Any]) -> _Trained:
        before, start = interface_sent_bytes(needs_lab(self.spec.cell.link)), time.perf_counter()
        self._set_lr()
        self._buffers.save()
        self.attached.optimizer.zero_grad(set_to_none=True)
        self.task.model = self.attached.model
        passes, total = self.config.nsteps_update, 0.0
        for number in range(passes):
            last = number == passes - 1
            with contextlib.nullcontext() if last else self.attached.accumulating():
                loss: Tensor = self.task.loss(next(batches)) / passes
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.attached.step(self.config.clip)
        if self.attached.skipped:
            self._buffers.restore()
        self.task.model = self.network
        sent = self.attached.sent_bytes(self.done.step)
        time.sleep(pause_seconds(self.spec.cell.link, sent))
        return _Trained(time.perf_counter() - start, total, sent, before)

    def _set_lr(self) -> None:
        done, per_epoch = self.done, self.task.steps_per_epoch
        position = StepPosition(done.epoch, done.step, per_epoch, self.limit, self.comm.world)
        lr = self.config.schedule(self.config.lr * self.contender.lr, position)
        for group in self.attached.optimizer.param_groups:
            group["lr"] = lr

    def _record(self, trained: _Trained) -> None:
        """Agree on the time of the step, and advance the clock."""
        number = self.done.step
        own = torch.tensor([trained.seconds, trained.loss, trained.sent_bytes], dtype=torch.float64)
        of_ranks = torch.stack(self.comm.all_gather_sealed(own, own.nbytes, "clock"))
        slowest, sent = float(of_ranks[:, 0].max()), float(of_ranks[:, 2].mean())
        if trained.counter is not None:  # all ranks are here, so what they sent has arrived and is counted
            after = interface_sent_bytes(True)
            assert after is not None
            counted = torch.tensor([after - trained.counter], dtype=torch.int64)
            sent = float(torch.stack(self.comm.all_gather_sealed(counted, 8, "bytes")).double().mean())
        self._losses.append(float(of_ranks[:, 1].mean()))
        self.done.step, self.done.in_epoch = number + 1, self.done.in_epoch + 1
        self.done.clock, self.done.sent_bytes = self.done.clock + slowest, self.done.sent_bytes + sent
        if self.comm.rank == 0:
            self.folder.add_step(Step(number + 1, self.attached.phase(number), slowest, sent))
            if time.monotonic() - self._said > _SAY_SECONDS:
                self._say("training")

    def _at_limit(self) -> str | None:
        if self.race.seconds is not None and not self.timing:
            return "time" if self.done.clock >= self.race.seconds else None
        return "limit" if self.done.step >= self.limit else None

    @torch.no_grad()
    def _validate(self) -> str | None:
        """Validate on every sample once, sharded over the ranks; returns what that ends, if anything."""
        self.attached.synchronize()
        network = self.task.model = self.attached.whole_model()
        check_replicas(self.comm, network, f"step {self.done.step}")
        self._buffers.save()
        average_buffers(self.comm, network)
        network.eval()
        tally = self.task.validate()
        network.train()
        self._buffers.restore()
        self.attached.localize()
        self.task.model = self.network
        sums: dict[str, float] = {}
        for of_rank in gather_json(self.comm, tally.sums, "validation"):
            for name, amount in of_rank.items():
                sums[name] = sums.get(name, 0.0) + amount
        metrics = self.task.metrics(sums)
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses = []
        self._last = Point(self.done.step, self.done.clock, self.done.sent_bytes, metrics, loss)
        if self.comm.rank == 0:
            self.folder.add_point(self._last)
            self._say("training")
        return self._judge(metrics)

    def _judge(self, metrics: dict[str, float]) -> str | None:
        target = self.race.target
        if target is not None and target.metric not in metrics:
            raise RaceError(f"--target {target}: no metric {target.metric!r}; there are {', '.join(metrics)}")
        if target is not None and target.reached(metrics):
            return "target"
        if self.done.step and finite(metrics.get("val loss", 0.0)) is None:
            return "diverged"
        return None

    def _result(self, ended: str) -> dict[str, Any]:
        return {
            "ended": ended,
            "steps": self.done.step,
            "seconds": self.done.clock,
            "sent_bytes": self.done.sent_bytes,
            "bytes_source": "kernel" if needs_lab(self.spec.cell.link) else "modelled or metered",
            "parameters": self.attached.parameters,
            "metric": self.task.metric,
            "data": self.task.data,
            "torch": torch.__version__,
        }

    # Checkpoints.

    def _save_due(self) -> bool:
        return self.done.clock - self.done.saved_at >= self.race.save_seconds

    def _save(self) -> None:
        self.done.saved_at = self.done.clock
        if self.comm.rank == 0:
            self.folder.flush()
        self.attached.synchronize()
        shared, own = capture_state(self.task, self.attached)
        shared |= {"progress": asdict(self.done), "losses": self._losses}
        self._checkpoints.save(self.comm, Snapshot(self.done.step, self.done.epoch, shared, own))
        self.attached.localize()

    def _resume(self) -> None:
        if not self.attached.resumable or self._checkpoints.newest(self.comm) is None:
            return
        found = self._checkpoints.load(self.comm)
        restore_state(self.task, self.attached, found.shared, found.own)
        self.attached.localize()
        self.done = Progress(**found.shared["progress"])
        self._losses = list(found.shared["losses"])

    def _say(self, doing: str) -> None:
        if self.comm.rank == 0:
            self._said = time.monotonic()
            metrics = {} if self._last is None else self._last.metrics
            known = {name: finite(value) for name, value in metrics.items()}
            self.folder.say(doing=doing, step=self.done.step, seconds=self.done.clock, metrics=known)


def _contender(spec: Spec) -> Contender:
    contender = parse_contender(spec.cell.contender)
    return contender.with_warmup(TIMED_WARMUP) if spec.cell.kind == TIMING else contender
