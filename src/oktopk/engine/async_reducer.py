"""Steps in the background: what all front ends are made of."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import Communicator
from ..errors import NonFiniteError, name_step
from ..feedback.buckets import Bucket
from ..metrics.events import SPARSE, MetricsSink, StepEvent
from ..metrics.sinks import TrainerLists
from .settings import Settings
from .small_sums import Poster
from .state_dict import load_state, save_state
from .step import StepReducer
from .worker import Job, Worker

_log = logging.getLogger(__name__)
Self = TypeVar("Self", bound="AsyncReducer")


class Scaler(Protocol):
    """torch.amp.GradScaler, as far as it is needed here."""

    def get_scale(self) -> float: ...

    def is_enabled(self) -> bool: ...


class AsyncReducer:
    """One FIFO worker thread with a communicator of its own, and the reducer it drives.

    submit() hands over a bucket and returns at once; finish() waits for all buckets of the step. After an error
    every call raises it, on every rank: a rank that fails tells the others, or they meet their timeout.
    """

    def __init__(
        self,
        settings: Settings,
        comm: Communicator,
        *,
        owns_comm: bool,
        trainer: Any = None,
        grad_scaler: Scaler | None = None,
        sinks: Iterable[MetricsSink] = (),
        unused_stay: bool = False,
        poster: Poster | None = None,
    ) -> None:
        self.settings = settings
        self._comm, self._owns_comm = comm, owns_comm
        self._steps = StepReducer(settings, comm, sinks, unused_stay, poster)
        steps = self._steps  # the worker must not keep this object alive

        def give_up(error: BaseException) -> None:
            name_step(error, comm.rank, steps.step)
            if not isinstance(error, NonFiniteError):  # that one all ranks raise by themselves
                comm.fail(error)
            steps.give_up()

        self._worker = Worker(f"oktopk worker of rank {comm.rank}", give_up, comm.interrupt)
        self._scaler = grad_scaler
        self._first_handed: float | None = None
        self._last_handed = 0.0
        self._in_worker = False
        """Whether a bucket of this step is reduced by the worker; then all that follow are."""
        if trainer is None:
            _log.debug("no trainer is linked: its lists of metrics are not filled")
        else:
            self.set_trainer(trainer)

    # The step.

    def submit(self, bucket: Bucket, grad: Tensor, last: bool = False) -> None:
        """Reduce a flat gradient in the background. Its memory belongs to the worker until finish().

        Of the dense sums that the caller begins itself, finish() waits for that of the `last` bucket, and the
        worker for the others.
        """
        steps, scale = self._steps, self._scale()
        if self._in_worker or not steps.posts(bucket, grad):
            self._hand_over(lambda: steps.reduce(bucket, grad, scale))
            return
        self._take_time()
        self._worker.here(lambda: steps.post(bucket, grad, scale))
        if not last:
            self._worker.submit(lambda: steps.end_sums(1))

    def sum_alone(self, bucket: Bucket, grad: Tensor) -> bool:
        """Do a step that has no other bucket at once, if this one goes dense; whether it did."""
        steps, scale = self._steps, self._scale()
        if self._first_handed is not None or not steps.posts(bucket, grad):
            return False
        self._take_time()
        start = self._last_handed
        self._worker.here(lambda: steps.sum_alone(bucket, grad, scale, start))
        self._first_handed = None
        return True

    @property
    def scaled(self) -> bool:
        """Whether a GradScaler is at work; one that is disabled is none."""
        return self._scaler is not None and self._scaler.is_enabled()

    def _scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler is not None and self.scaled else None

    def clip_factor(self, grads: Iterable[Tensor]) -> float:
        """What norm_clip asks to multiply these gradients with, the whole of this rank's."""
        if self.settings.norm_clip is None:
            return 1.0
        norm = math.hypot(*(_norm(grad) for grad in grads)) / (self._scale() or 1.0)
        # One that is not finite is left as it is: the reduction will find it.
        return self.settings.norm_clip / norm if self.settings.norm_clip < norm < math.inf else 1.0

    def _hand_over(self, job: Job) -> None:
        self._take_time()
        self._in_worker = True
        self._worker.submit(job)

    def _take_time(self) -> None:
        self._last_handed = time.perf_counter()
        if self._first_handed is None:
            self._first_handed = self._last_handed

    def _last_job(self, job: Job) -> None:
        """The end of a step, in the thread that has reduced its last bucket."""
        if self._in_worker:
            self._first_handed, self._in_worker = None, False
            self._worker.submit(job)
            self._worker.wait()
        else:
            self._worker.wait()
            self._worker.here(job)
            self._first_handed = None

    def finish(self) -> StepEvent:
        """Wait until all buckets are reduced; then either all results are in place, or the step is skipped."""
        if self._first_handed is None:
            raise RuntimeError("finish() without a submitted bucket")
        steps, start, handed_over = self._steps, self._first_handed, self._last_handed

        def settle() -> None:
            steps.finish(start, handed_over)

        self._last_job(settle)
        assert steps.last is not None
        return steps.last

    def abandon(self, overwritten: bool = False) -> None:
        """Give up a step that was begun but will not be finished: its buckets go back to the residuals.

        Only what was sent does so if their memory is `overwritten`.
        """
        steps = self._steps
        if self._first_handed is not None:
            self._last_job(lambda: steps.abandon(overwritten))

    def run(self, job: Callable[[Communicator], None]) -> None:
        """Let the worker communicate about something else, after what it has to do, and wait for it."""
        meter = self._steps.meter

        def apart() -> None:
            job(meter)
            meter.take()  # these bytes belong to no step

        self._worker.submit(apart)
        self._worker.wait()

    def drain(self) -> None:
        """Wait for the worker to be done with what it has."""
        self._worker.wait()

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def world(self) -> int:
        return self._comm.world

    @property
    def step(self) -> int:
        """How many steps have been reduced."""
        return self._steps.step

    @property
    def last(self) -> StepEvent | None:
        """What happened in the last step."""
        return self._steps.last

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because something was not finite."""
        return self._steps.skipped

    # Metrics.

    def set_trainer(self, trainer: Any) -> None:
        """Fill trainer.sparsities, .compression_ratios, .communication_sizes from now on: one entry per step."""
        self.add_sink(TrainerLists(trainer))

    def add_sink(self, sink: MetricsSink) -> None:
        """Tell one more sink about every step from now on."""
        self.drain()
        self._steps.sinks.append(sink)

    def stats(self) -> dict[str, float]:
        """The present state in figures, for loggers."""
        self.drain()
        steps, last = self._steps, self._steps.last
        figures = {
            "step": float(steps.step),
            "skipped_steps": float(steps.skipped_steps),
            "skipped_in_a_row": float(steps.skipped_in_a_row),
        }
        if last is not None:
            figures |= {
                "sparse": float(last.phase == SPARSE),
                "target_density": last.target_density,
                "local_density": last.local_density,
                "global_density": last.global_density,
                "compression_ratio": last.volume.ratio,
                "payload_bytes": float(last.volume.payload_bytes),
                "sent_bytes": float(last.wire.sent_bytes),
                "received_bytes": float(last.wire.received_bytes),
                "residual_norm": last.residual_norm,
                "reduce_seconds": last.seconds.total,
                "exposed_seconds": last.exposed,
                "hidden_share": last.hidden_share,
            }
        if self.settings.auto:
            figures["dense_step_seconds"], figures["sparse_step_seconds"] = steps.ways.whole.agreed
        for lane in (lane for lane in steps.lanes.values() if self.settings.auto and not lane.never_sparse):
            dense, sparse = lane.choice.agreed
            figures |= {
                f"bucket{lane.index}/goes_dense": float(lane.choice.dense),
                f"bucket{lane.index}/dense_seconds": dense,
                f"bucket{lane.index}/sparse_seconds": sparse,
            }
        return figures

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All that this rank must keep, as tensors and primitives: every rank saves its own."""
        self._check_between_steps()
        return save_state(self._steps)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where this rank's state_dict() was taken."""
        self._check_between_steps()
        load_state(self._steps, saved)

    def _check_between_steps(self) -> None:
        self.drain()
        if self._first_handed is not None:
            raise RuntimeError("a step is under way: finish it, by step() or synchronize(), and save or load then")

    # Optimizers and lifetime.

    def check_momentum(self, optimizer: Optimizer) -> None:
        if self.settings.momentum and any(
            group.get("momentum") or any(group.get("betas", ())[:1]) for group in optimizer.param_groups
        ):
            raise ValueError(
                f"momentum correction (momentum={self.settings.momentum}) replaces the optimizer's own momentum: "
                f"set that of {type(optimizer).__name__} to 0, or take plain SGD"
            )

    def close(self) -> None:
        """End the worker thread and its connections, and close the sinks, all that were given. Twice is fine."""
        ended = self._worker.close(wake=self._owns_comm)
        if self._owns_comm:
            self._comm.close()
        if not ended:
            _log.warning(
                "the worker still waits for another rank, and ends when its timeout of %g s has passed",
                self._comm.timeout,
            )
        for sink in self._steps.sinks:
            sink.close()

    def __repr__(self) -> str:
        settings = self.settings
        return (
            f"{type(self).__name__}(algorithm={settings.algorithm.name!r}, density={settings.density:g}, "
            f"warmup_steps={settings.warmup_steps}, step={self.step}, rank {self.rank} of {self.world})"
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _norm(grad: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(grad, dtype=torch.float32))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(grad, dtype=torch.float64))
