"""DistributedOptimizer: a wrapped optimizer averages gradients before each step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import Unpack

from ..algorithms import Algorithm
from ..comm import Communicator, checking_together, exclusive_communicator
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import Density, Options, Settings
from ..feedback.buckets import DEFAULT_BUCKET_MB, Bucket, BucketPlan
from ..metrics.events import MetricsSink, StepEvent
from .base import check_momentum, check_sinks, choose_algorithm, warn_adaptive
from .watching import calling_scaler
from .wrapped import WrappedOptimizer


class DistributedOptimizer(WrappedOptimizer):
    """Any torch optimizer, with gradients averaged over all ranks by sparse all-reduce before every step.

    It is an Optimizer itself: schedulers, param_groups, state_dict and closures work. The loss that a closure
    returns becomes the mean over ranks, so that all ranks decide alike. Call synchronize() before clipping, and
    before a GradScaler's step().

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: pairs of name and parameter, all that the optimizer has; by default those of `model`.
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object.
        density: share of entries that each rank sends in a sparse step, by default 1 %; "auto" to choose it by
            measurement, within a `budget`; or pairs (step, density), such as the `schedule` of another run, to
            repeat that one.
        warmup_steps: number of dense steps before the sparse phase. By default 128 if you pass a density, else a
            share of `total_steps`: 1 %, and 8 % more in which the density falls from 25 %.
        norm_clip: scale this rank's gradient down to this norm before it is compressed.
        model: the model, whose parameters give the names; its buffers start as those of rank 0, too.
        comm: the ranks; by default those of torch.distributed, over connections of its own.
        backward_passes: number of backward passes that make a step (gradient accumulation).
        broadcast: whether all ranks start with the parameters of rank 0.
        buckets: "model" for one bucket (the paper's k of the whole model), a size in MB, or lists of names.
        auto: measure dense and sparse steps, and use the faster way.
        grad_scaler: the GradScaler whose scale the gradients have.
        trainer: an object whose lists of metrics are filled; see set_trainer().
        sinks: where the metrics of every step go.
        timeout: seconds that a rank that is alive may keep others waiting; by default the process group's own.
        compressor: another name for `algorithm`.
        **options: the other fields of `oktopk.Settings`.

    Example:
        >>> import torch, oktopk
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with oktopk.DistributedOptimizer(inner, model=model, density=0.01) as optimizer:
        ...     model(torch.ones(1, 2)).sum().backward()      # buckets leave as soon as they are complete
        ...     optimizer.step()                              # waits for the rest, then steps
        >>> optimizer.skipped
        False
    """

    def __init__(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        algorithm: str | Algorithm = "oktopk", density: Density | None = None, warmup_steps: int | None = None,
        norm_clip: float | None = None, *, model: nn.Module | None = None, comm: Communicator | None = None,
        backward_passes: int = 1, broadcast: bool = True, buckets: BucketPlan = DEFAULT_BUCKET_MB,
        auto: bool = True, grad_scaler: Scaler | None = None, trainer: Any = None,
        sinks: Iterable[MetricsSink] = (), timeout: float | None = None,
        compressor: str | Algorithm | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        ranks = exclusive_communicator(timeout) if comm is None else comm
        with checking_together(ranks, owned=comm is None) as terms:
            if backward_passes < 1:
                raise ValueError(f"backward_passes must be at least 1, got {backward_passes}")
            chosen = choose_algorithm(algorithm, compressor)
            settings = Settings.from_options(chosen, density, warmup_steps, norm_clip, auto, options)
            terms |= settings.terms() | self._wrap(optimizer, named_parameters, model, buckets)
            terms |= {"backward_passes": backward_passes, "broadcast": broadcast}
            check_momentum(settings, optimizer)
            checked = check_sinks(sinks, trainer)
            warn_adaptive(settings, optimizer, ranks.rank)
        self._held = AsyncReducer(settings, ranks, owns_comm=comm is None, grad_scaler=grad_scaler, sinks=checked)
        self._held.plan(self._gradients.size)
        self._backward_passes = backward_passes
        self._synchronized = False
        self._applied = True
        """Whether the last mean was: what is averaged is applied by all ranks or by none."""
        self._lock = threading.Lock()  # with several devices, hooks run in several threads
        self._handles: dict[str, RemovableHandle] = {}
        self._expect()
        if broadcast:
            self.broadcast(model)

    # Gradients, as backward delivers them.

    def _listen(self, names: Iterable[str]) -> None:
        listener = weakref.ref(self)  # parameters outlive an optimizer that is thrown away, in a notebook say
        for name in names:

            def arrived(_: Tensor, name: str = name) -> None:
                optimizer = listener()
                if optimizer is not None:
                    optimizer._arrived(name)

            self._handles[name] = self._named[name].register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def _expect(self) -> None:
        """A new step: every gradient is to come `backward_passes` times."""
        names = self._gradients.names
        self._listen(name for name in names if name not in self._handles)
        self._begun = False
        """Whether this step has a gradient."""
        self._to_come = dict.fromkeys(names, self._backward_passes)
        self._bucket_of = {name: bucket for bucket in self._gradients.buckets for name in bucket.names}
        self._incomplete = {bucket: len(bucket.names) for bucket in self._gradients.buckets}
        self._waiting: list[Bucket] = list(self._gradients.buckets)

    def _begin(self) -> None:
        """The first gradient of a step: the model may have changed since the last one."""
        if self._begun:
            return
        self._check_known()
        if not self._applied:
            self._agree_unapplied()
            self._applied = True
        if self._gradients.follow(self._engine):
            self._expect()
        self._begun = True

    def _arrived(self, name: str) -> None:
        with self._engine.uninterrupted(), self._lock:
            self._begin()
            if name not in self._to_come:  # unfrozen in the middle of a step: synchronize() will say so
                return
            if self._to_come[name] == 0:
                raise RuntimeError(
                    f"the gradient of {name} came again before step(): set backward_passes to the number of "
                    "backward passes in a step"
                )
            self._synchronized = False
            self._to_come[name] -= 1
            if self._to_come[name] == 0:
                self._incomplete[self._bucket_of[name]] -= 1
            if self._engine.settings.norm_clip is None:  # otherwise the norm of all gradients is needed first
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Hand over complete buckets, but in the one order that all ranks follow."""
        while self._waiting and self._incomplete[self._waiting[0]] == 0:
            bucket = self._waiting.pop(0)
            grads = {name: self._named[name].grad for name in bucket.names}
            self._gradients.submit(self._engine, bucket, grads)

    @property
    def _under_way(self) -> bool:
        return len(self._waiting) < len(self._gradients.buckets)

    def synchronize(self) -> StepEvent:
        """Wait until all gradients are averaged; missing ones count as zeros. step() then goes on from here.

        Called again before the next backward pass, it changes nothing.
        """
        if self._synchronized and self.last is not None:
            return self.last
        with self._engine.uninterrupted():
            self._begin()
            for name in self._gradients.thawed():
                raise RuntimeError(
                    f"{name} was unfrozen in the middle of a step: unfreeze parameters after step()"
                )
            grads = {name: self._named[name].grad for name in self._gradients.names}
            factor = self._engine.clip_factor(grad for grad in grads.values() if grad is not None)
            while self._waiting:
                self._gradients.submit(self._engine, self._waiting.pop(0), grads, factor)
            for name, grad in self._gradients.finish(self._engine, grads).items():
                self._named[name].grad = grad
            self._expect()
            self._synchronized, self._applied = True, self.skipped
        assert self.last is not None
        return self.last

    # What an optimizer does.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what is not averaged yet, and step. A step with numbers that are not finite changes nothing."""
        if not self._engine.scaled and calling_scaler() is not None:
            raise RuntimeError(
                "the gradients are scaled: pass DistributedOptimizer(grad_scaler=scaler), and call "
                "optimizer.synchronize() before scaler.step(optimizer)"
            )
        with self._engine.uninterrupted():
            if closure is not None:
                result = self.inner.step(self._with_average(closure))
            else:
                result = self._step()
            self._applied = True
        return result

    def _step(self) -> Any:
        if not self._synchronized:
            if self._engine.scaled:
                raise RuntimeError("call optimizer.synchronize() after backward, before GradScaler.step()")
            self.synchronize()
        self._synchronized = False
        return None if self.skipped else self.inner.step()

    def _with_average(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized, self._applied = False, True
            if self.skipped:
                self.zero_grad()
            if loss is None:
                return None
            mean = torch.as_tensor(loss).detach().clone().to(torch.float32).reshape(1).cpu()
            self.run(lambda comm: comm.all_reduce_(mean, "loss", control=True))
            return mean.div_(self._engine.world).to(torch.as_tensor(loss).device).squeeze(0)

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._under_way:
            self._engine.check()
            raise RuntimeError(
                "gradients are being averaged: before zero_grad() call step(), synchronize() or, if backward has "
                "failed on all ranks, abandon()"
            )
        self._synchronized = False
        self._expect()  # of a backward pass that failed before a bucket was complete
        super().zero_grad(set_to_none)

    def abandon(self) -> None:
        """Give up a step whose backward pass has failed, on all ranks: what was sent returns to the residuals."""
        with self._engine.uninterrupted():
            self._engine.abandon()
            self._expect()

    def _check_between_steps(self, what: str) -> None:
        if self._under_way:
            raise RuntimeError(f"gradients are being averaged: {what} after step()")

    def _buckets_changed(self) -> None:
        self._expect()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); one of a plain optimizer will do, then residuals start at zero."""
        super().load_state_dict(state_dict)
        self._synchronized, self._applied = False, True  # what was averaged before belongs to another state

    def close(self) -> None:
        """Remove the hooks and end the worker thread; the inner optimizer can be used on."""
        for handle in self._handles.values():
            handle.remove()
        super().close()
