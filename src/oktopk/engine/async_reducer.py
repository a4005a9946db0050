"""Steps in the background: the engine that every front end holds."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from ..comm import Communicator, checking_together
from ..errors import NonFiniteError, add_step
from ..feedback.buckets import Bucket
from ..metrics.events import MetricsSink, StepEvent
from ..utils.streams import SideStream, side_stream_of
from .settings import GRADIENTS, Settings
from .state_dict import read_state, save_state
from .step import StepReducer
from .voice.speaking import compile_once
from .worker import Job, Worker

_log = logging.getLogger(__name__)
T = TypeVar("T")


_UNKNOWN_SCALER = (
    "a GradScaler scales these gradients, and its scale was needed before the optimizer's first step: pass it as "
    "grad_scaler="
)
_STEPPED_WITHOUT = (
    "these gradients were taken for scaled by the GradScaler of earlier steps, but it does not take this step: "
    "call scaler.step(optimizer), or pass grad_scaler= if you unscale and step yourself"
)
_SAVED_SCALED = (
    "the state was saved by a run with a GradScaler, whose scale is needed from the first step on: pass it as "
    "grad_scaler=; without one, GradScaler(enabled=False)"
)


class Scaler(Protocol):
    """torch.amp.GradScaler, as far as it is needed here."""

    def get_scale(self) -> float: ...

    def is_enabled(self) -> bool: ...


class AsyncReducer:
    """Averages buckets while backward goes on: submit() returns at once, finish() waits for the whole step.

    In a sparse step a worker thread reduces buckets in the order they are submitted. In a dense step the calling
    thread only begins the library's all-reduce, and finish() waits for it: no thread has to be woken. After an
    error every call raises it, on every rank: a rank that fails tells the others, or they meet their timeout.

    Args:
        settings: how to reduce.
        comm: the ranks; nobody else may use it.
        owns_comm: whether close() closes it.
        grad_scaler: the GradScaler whose scale the gradients have.
        sinks: where the metrics of every step go.
        unused_stay: whether residuals of parameters without a gradient are kept back, as DDP needs it.
        averages: what the buckets hold, and so the residuals: GRADIENTS or UPDATES.
        whole: the ranks that skip steps and autotune together, if they are more than those of `comm`; it is closed
            together with that.
    """

    def __init__(
        self, settings: Settings, comm: Communicator, *, owns_comm: bool, grad_scaler: Scaler | None = None,
        sinks: Iterable[MetricsSink] = (), unused_stay: bool = False, averages: str = GRADIENTS,
        whole: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._comm, self._owns_comm, self._scaler = comm, owns_comm, grad_scaler
        self._scaler_was_given = grad_scaler is not None
        self._steps = StepReducer(settings, comm, sinks, unused_stay, averages, whole)
        self._comms = comms = [comm] if whole is None else [comm, whole]
        steps, rank = self._steps, comm.global_rank(comm.rank)  # the worker must not keep this object alive

        def give_up(error: BaseException) -> None:
            add_step(error, rank, steps.step)
            steps.voice.failed = True
            if not isinstance(error, NonFiniteError):  # that one all ranks raise by themselves
                for ranks in comms:
                    ranks.fail(error)
            steps.give_up()

        def interrupt() -> None:
            for ranks in comms:
                ranks.interrupt()

        self._worker = Worker(f"oktopk worker of rank {rank}", give_up, interrupt)
        self._ending = weakref.finalize(self, steps.voice.end)
        """Says at the end, also that of the process, why a run never went sparse."""
        self._first_handed: float | None = None
        """When the first bucket of the step under way was handed in."""
        self._last_handed = 0.0
        self._scale_of_step: float | None = None
        self._device: torch.device | None = None
        """Where the gradients of this step are."""
        self._side: SideStream | None = None
        """That of the device, if it has streams."""
        self._resident = False
        """Whether the step under way is reduced without the host."""

    # The step.

    def submit(self, bucket: Bucket, grad: Tensor, fill: Job | None = None) -> None:
        """Average a flat gradient in the background; its memory belongs to the engine until finish().

        `fill`, if given, is called first, in the thread that reduces the bucket, to write the gradient there.
        """
        steps = self._steps
        if self._first_handed is None:
            self._scale_of_step = self._scale()
        scale = self._scale_of_step

        def reduce() -> None:
            if fill is not None:
                fill()
            steps.reduce(bucket, grad, scale)

        with self.uninterrupted():
            if self._first_handed is None:
                self._worker.wait()
                if steps.last is None:
                    compile_once(self.settings, speaks=steps.everyone.rank == 0)
                steps.begin()
                if grad.device != self._device:
                    self._device, self._side = grad.device, side_stream_of(grad)
                sparse = steps.density is not None
                self._resident = sparse and steps.device_collectives(grad.device) is not None
            self._last_handed = time.perf_counter()
            if self._first_handed is None:
                self._first_handed = self._last_handed
            if self._in_worker:
                self._worker.submit(self._aside(reduce, grad))
            else:
                self._worker.here(self._aside(reduce, grad) if self._resident else reduce)

    def _aside(self, job: Job, grad: Tensor | None = None) -> Job:
        return job if self._side is None else self._side.aside(job, grad)

    def uninterrupted(self) -> AbstractContextManager[None]:
        """A block of which a part is worse than nothing: after a Ctrl-C inside it every call is an error."""
        return self._worker.uninterrupted()

    @property
    def _in_worker(self) -> bool:
        """Whether the worker reduces the buckets of this step.

        Averaging inside a host would block the caller. What never waits is done by the caller: its collectives
        then are in the order of all others of the process group.
        """
        return (self._steps.density is not None and not self._resident) or self._steps.local is not None

    def finish(self) -> StepEvent:
        """Wait until all buckets are reduced; then either all results are in place, or the step is skipped."""
        if self._first_handed is None:
            raise RuntimeError("finish() without a submitted bucket")
        steps, start, handed_over = self._steps, self._first_handed, self._last_handed
        self._end_step(lambda: steps.finish(start, handed_over))
        assert steps.last is not None
        return steps.last

    def abandon(self, overwritten: bool = False) -> None:
        """Give up, on all ranks, a step that was begun but will not be finished: gradients go to the residuals.

        Only what was sent does so if their memory is `overwritten`.
        """
        steps = self._steps
        if self._first_handed is not None:
            self._end_step(lambda: steps.abandon(overwritten))

    def _end_step(self, job: Callable[[], object]) -> None:
        """Run the last job of a step, in the thread that has reduced its buckets."""
        with self.uninterrupted():
            self._first_handed = None
            if self._in_worker:
                self._worker.submit(self._aside(job))
                self._worker.wait()
            else:
                self._worker.here(self._aside(job) if self._resident else job)
            if self._side is not None:
                self._side.join()

    def skip_next(self, nonfinite: Iterable[str], scale: float | None = None) -> None:
        """Let all ranks skip the step whose buckets are submitted next; they are not exchanged.

        Args:
            nonfinite: this rank's parameters that are the reason; none, if it is another rank's.
            scale: of a GradScaler, which will lower it.
        """
        steps, names = self._steps, list(nonfinite)
        self.run(lambda _: steps.skip_next(names, scale), counted=True)

    def run(self, job: Callable[[Communicator], T], counted: bool = False, replicas: bool = False) -> T:
        """Let the worker communicate about something else, and return the result of `job`.

        Its traffic belongs to no step, or, if it is `counted`, to the next one. It is called with all ranks, or
        with the `replicas` that buckets are exchanged with.
        """
        meter, results = self._steps.meter if replicas else self._steps.everyone, []

        def communicate() -> None:
            results.append(job(meter))
            if not counted:
                meter.pop_traffic()

        with self.uninterrupted():
            self._worker.submit(communicate)
            self._worker.wait()
        return results[0]

    @contextmanager
    def checking_together(self) -> Iterator[dict[str, object]]:
        """A block, between steps, that checks arguments: an error in it on one rank is an error on all."""
        self.drain()
        with ExitStack() as stack:
            for ranks in reversed(self._comms):  # what replicas do not agree on is told to the whole mesh, too
                terms = stack.enter_context(checking_together(ranks, owned=False))
            yield terms

    def give_up(self, error: Exception) -> NoReturn:
        """Raise an error of the calling thread on all ranks; one of the worker, if there was one before."""

        def fail() -> None:
            raise error

        self._worker.here(fail)
        raise AssertionError("unreachable")

    def check(self) -> None:
        """Raise the error that there was, if any."""
        self._worker.check()

    def drain(self) -> None:
        """Wait until the worker has nothing to do."""
        self._worker.wait()

    # Scaling and clipping.

    @property
    def scaled(self) -> bool:
        """Whether a GradScaler is at work; a disabled one is none."""
        return self._scaler is not None and self._scaler.is_enabled()

    def await_scaler(self, waits: bool) -> None:
        """Set whether a GradScaler may be at work that is not known yet: no optimizer has stepped so far.

        A skipped step then hands back NaN, which a GradScaler reacts to. If all steps so far were skipped, nothing
        is kept of them: they had scales that are not known.
        """
        self._steps.skips.may_be_scaled = waits and self._scaler is None

    def notice_scaler(self, scaler: Scaler | None) -> None:
        """An optimizer is about to step, called by this GradScaler, or by none: all ranks notice the same.

        The gradients of the last step had its scale, those to come will have it. What was kept before would be in
        other units: then it is refused.
        """
        known = self._scaler
        if self._scaler_was_given and (scaler is None or self.scaled):
            return
        if scaler is None:
            if known is not None:
                raise RuntimeError(_STEPPED_WITHOUT)
            self._steps.skips.end_quiet()
        elif scaler is not known and (known is None or known.get_scale() != scaler.get_scale()):
            self.drain()
            if known is not None or self._needs_scale():
                raise RuntimeError(_UNKNOWN_SCALER)
            self._steps.rescale(1.0 / float(scaler.get_scale()))
        self._scaler = scaler

    def _needs_scale(self) -> bool:
        """Whether the scale of the gradients should have been known before."""
        settings = self.settings
        return settings.norm_clip is not None or settings.warmup_values == "fp16" or self._steps.keeps_unscaled

    def _scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler is not None and self.scaled else None

    def clip_factor(self, grads: Iterable[Tensor], combine: Callable[[float], float] | None = None) -> float:
        """The factor by which norm_clip scales these gradients, all of this rank's.

        If it has only a shard of them, `combine` makes the norm of all shards of this one's.
        """
        if self.settings.norm_clip is None:
            return 1.0
        norm = math.hypot(*(_norm(grad) for grad in grads)) / (self._scale() or 1.0)
        if combine is not None:
            norm = combine(norm)
        # One that is not finite is left as it is: the reduction will find it.
        return self.settings.norm_clip / norm if self.settings.norm_clip < norm < math.inf else 1.0

    # State and metrics.

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
        """The metrics of the last step."""
        return self._steps.last

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self._steps.skipped

    @property
    def layout(self) -> tuple[Bucket, ...]:
        """The buckets of the last step, or of the checkpoint that was loaded."""
        return tuple(self._steps.buckets.states)

    def drop_residuals(self) -> None:
        """Forget, between steps, what this rank keeps back."""
        self._check_between_steps()
        self._steps.drop_residuals()

    def residual(self, bucket: Bucket) -> Tensor | None:
        """What this rank keeps back of a bucket, between steps; None if that is nothing, or a whole host's."""
        return None if self._steps.local is not None else self._steps.reducer.residuals.get(bucket)

    @property
    def schedule(self) -> list[tuple[int, float | None]]:
        """The density of every step so far, as pairs (step, density): from that step on; None is dense."""
        self.drain()
        return list(self._steps.schedule)

    def plan(self, parameters: int) -> None:
        """Say what is going to happen, for so many parameters."""
        self._steps.voice.plan(parameters)

    def summary(self) -> str:
        """The present state in words."""
        self.drain()
        return self._steps.voice.summary(self.step)

    def add_sink(self, sink: MetricsSink) -> None:
        """Pass every step from now on to one more sink."""
        self.drain()
        self._steps.sinks.add(sink)

    def stats(self) -> dict[str, float]:
        """The present state in figures, for loggers."""
        self.drain()
        steps = self._steps
        counts = {
            "step": float(steps.step),
            "skipped_steps": float(steps.skips.total),
            "skipped_in_a_row": float(steps.skips.in_a_row),
        }
        return counts | steps.voice.figures()

    def state_dict(self) -> dict[str, Any]:
        """All that this rank must keep, as tensors and primitives: every rank saves its own."""
        self._check_between_steps()
        return save_state(self._steps) | {"scaled": self.scaled}

    def load_state_dict(self, saved: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> None:
        """Go on where this rank's state_dict() was taken; `sizes` are those of the parameters, if known."""
        self.read_state_dict(saved, sizes)()

    def read_state_dict(
        self, saved: Mapping[str, Any], sizes: Mapping[str, int] | None = None
    ) -> Callable[[], None]:
        """Check a state_dict() in full, and change nothing; the function that is returned takes it over."""
        self._check_between_steps()
        if isinstance(saved, Mapping) and saved.get("scaled") and self._scaler is None:
            raise ValueError(_SAVED_SCALED)
        return read_state(self._steps, saved, sizes)

    def _check_between_steps(self) -> None:
        self.drain()
        if self._first_handed is not None:
            raise RuntimeError("a step is under way: call step() or synchronize() before you save or load")

    def close(self) -> None:
        """End the worker thread and its connections, and close the sinks. Calling it twice is fine."""
        ended = self._worker.close(wake=self._owns_comm)
        if self._owns_comm:
            for ranks in self._comms:
                ranks.close()
        if not ended:
            _log.warning(
                "the worker still waits for another rank, and ends after its timeout of %g s", self._comm.timeout
            )
        first = self._ending.alive
        self._ending()
        if first:
            self._steps.sinks.close(self.step)

    def fail(self) -> None:
        """The run ends with an error of the caller: nothing is said of its end."""
        self._steps.voice.failed = True

    def __repr__(self) -> str:
        settings, density = self.settings, self.settings.density
        shown = f"{len(density)} pairs" if isinstance(density, tuple) else repr(density)
        return (
            f"algorithm={settings.algorithm.name!r}, density={shown}, "
            f"warmup_steps={settings.warmup_steps}, step={self.step}, rank {self.rank} of {self.world}"
        )


def _norm(grad: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(grad, dtype=torch.float32))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(grad, dtype=torch.float64))
