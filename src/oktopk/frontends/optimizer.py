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
from ..comm import Communicator, exclusive_communicator
from ..comm.broadcast import broadcast_tensors
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import Options, Settings
from ..feedback.buckets import DEFAULT_BUCKET_MB, Bucket, BucketPlan
from ..metrics.events import MetricsSink, StepEvent
from ..utils.timeouts import TIMEOUTS
from .base import FrontEnd, check_momentum, choose_algorithm
from .bucketed import BucketedGradients


class DistributedOptimizer(FrontEnd, Optimizer):
    """Any torch optimizer, with gradients averaged over all ranks by sparse all-reduce before every step.

    It is an Optimizer itself: schedulers, param_groups, state_dict and closures work. The loss that a closure
    returns becomes the mean over ranks, so that all ranks decide alike. Call synchronize() before clipping, and
    before a GradScaler's step().

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: pairs of name and parameter, all that the optimizer has; by default those of `model`.
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object.
        density: share of entries that each rank sends in a sparse step.
        warmup_steps: number of dense steps before the sparse phase.
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
        timeout: seconds that any wait for another rank may take.
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
        algorithm: str | Algorithm = "oktopk", density: float = 0.01, warmup_steps: int = 128,
        norm_clip: float | None = None, *, model: nn.Module | None = None, comm: Communicator | None = None,
        backward_passes: int = 1, broadcast: bool = True, buckets: BucketPlan = DEFAULT_BUCKET_MB,
        auto: bool = True, grad_scaler: Scaler | None = None, trainer: Any = None,
        sinks: Iterable[MetricsSink] = (), timeout: float = TIMEOUTS.operation,
        compressor: str | Algorithm | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if backward_passes < 1:
            raise ValueError(f"backward_passes must be at least 1, got {backward_passes}")
        chosen = choose_algorithm(algorithm, compressor)
        settings = Settings.from_options(chosen, density, warmup_steps, norm_clip, auto, options)
        check_momentum(settings, optimizer)
        self.inner = optimizer
        Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self._link()
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        self._named = name_parameters(optimizer, named_parameters)
        self._gradients = BucketedGradients(self._named, buckets)
        owned = exclusive_communicator(timeout) if comm is None else comm
        engine = AsyncReducer(settings, owned, owns_comm=comm is None, grad_scaler=grad_scaler, sinks=sinks)
        self._hold(engine, trainer)
        self._backward_passes = backward_passes
        self._synchronized = False
        self._lock = threading.Lock()  # with several devices, hooks run in several threads
        self._handles: list[RemovableHandle] = []
        self._listen(self._named)
        self._expect()
        if broadcast:
            self.broadcast(model)

    __repr__ = Optimizer.__repr__  # the groups, as of any optimizer

    # Gradients, as backward delivers them.

    def _listen(self, named: Mapping[str, nn.Parameter]) -> None:
        listener = weakref.ref(self)  # parameters outlive an optimizer that is thrown away, in a notebook say
        for name, parameter in named.items():

            def arrived(_: Tensor, name: str = name) -> None:
                optimizer = listener()
                if optimizer is not None:
                    optimizer._arrived(name)

            handle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _expect(self) -> None:
        """A new step: every gradient is to come `backward_passes` times."""
        self._to_come = dict.fromkeys(self._named, self._backward_passes)
        self._bucket_of = {name: bucket for bucket in self._gradients.buckets for name in bucket.names}
        self._incomplete = {bucket: len(bucket.names) for bucket in self._gradients.buckets}
        self._waiting: list[Bucket] = list(self._gradients.buckets)

    def _arrived(self, name: str) -> None:
        with self._lock:
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
        grads = {name: parameter.grad for name, parameter in self._named.items()}
        factor = self._engine.clip_factor(grad for grad in grads.values() if grad is not None)
        while self._waiting:
            self._gradients.submit(self._engine, self._waiting.pop(0), grads, factor)
        averaged = self._gradients.finish(self._engine, grads)
        for name, parameter in self._named.items():
            parameter.grad = averaged[name]
        self._expect()
        self._synchronized = True
        assert self.last is not None
        return self.last

    # What an optimizer does.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what is not averaged yet, and step. A step with numbers that are not finite changes nothing."""
        if closure is not None:
            return self.inner.step(self._with_average(closure))
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
            self._synchronized = False
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
            raise RuntimeError(
                "gradients are being averaged: before zero_grad() call step(), synchronize() or, if backward has "
                "failed on all ranks, abandon()"
            )
        self._synchronized = False
        super().zero_grad(set_to_none)

    def abandon(self) -> None:
        """Give up a step whose backward pass has failed, on all ranks: what was sent returns to the residuals."""
        self._engine.abandon()
        self._expect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters that join later are reduced in buckets of their own."""
        if not hasattr(self, "_engine"):  # while Optimizer.__init__ runs
            super().add_param_group(param_group)
            return
        if self._under_way:
            raise RuntimeError("gradients are being averaged: add parameters after step()")
        self.inner.add_param_group(param_group)
        self._link()
        every = name_parameters(self.inner, ((name, p) for name, p in self._named.items()), strict=False)
        new = {name: parameter for name, parameter in every.items() if name not in self._named}
        self._engine.drain()
        self._gradients.extend(new)
        self._named |= new
        self._listen(new)
        self._expect()
        self.run(lambda comm: broadcast_tensors(comm, new))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "oktopk" what this rank keeps back: every rank saves its own."""
        return {**self.inner.state_dict(), "oktopk": self._engine.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); one of a plain optimizer will do, then residuals start at zero."""
        own = {key: value for key, value in state_dict.items() if key != "oktopk"}
        apply = None
        if "oktopk" in state_dict:  # checked before the inner optimizer changes, which checks its own
            apply = self._gradients.read_state_dict(self._engine, state_dict["oktopk"])
        self.inner.load_state_dict(own)
        self._link()
        if apply is not None:
            apply()
            self._expect()

    def _link(self) -> None:
        """Groups and state are those of the inner optimizer, not copies."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    # What the engine does.

    def broadcast(self, model: nn.Module | None = None) -> None:
        """Give all ranks the parameters of rank 0, and the buffers of a model."""
        tensors: dict[str, Tensor] = dict(self._named)
        if model is not None:
            tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
        self.run(lambda comm: broadcast_tensors(comm, tensors))

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._engine.rank

    def close(self) -> None:
        """Remove the hooks and end the worker thread; the inner optimizer can be used on."""
        for handle in self._handles:
            handle.remove()
        super().close()


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None, strict: bool = True
) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order of the model; without names they are numbered."""
    held = {
        parameter: f"group{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if parameter.requires_grad
    }
    if named_parameters is None:
        return {name: parameter for parameter, name in held.items()}
    given = list(named_parameters)
    named = {name: parameter for name, parameter in given if parameter in held}
    if len(named) < len({parameter for _, parameter in given if parameter in held}):
        raise ValueError("two parameters have the same name: give names that are unique over all groups")
    unnamed = {name: parameter for parameter, name in held.items() if parameter not in set(named.values())}
    if unnamed and strict:
        raise ValueError(
            f"{len(unnamed)} parameters of the optimizer are not in named_parameters, the first of shape "
            f"{tuple(next(iter(unnamed.values())).shape)}: pass those of the whole model"
        )
    return named | unnamed
