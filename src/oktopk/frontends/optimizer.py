"""The front end for a hand-made loop with any optimizer: wrap it, and gradients are averaged before each step."""

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
from ..comm import DEFAULT_TIMEOUT, Communicator
from ..comm.broadcast import broadcast_tensors
from ..engine.async_reducer import Scaler
from ..engine.settings import Options
from ..feedback.buckets import DEFAULT_BUCKET_MB, Bucket, BucketPlan
from ..metrics.events import MetricsSink, StepEvent
from .allreducer import AllReducer


class DistributedOptimizer(Optimizer):
    """Any torch optimizer, with gradients averaged over all ranks by sparse allreduce before every step.

        optimizer = oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)
        loss(batch).backward()      # buckets leave as soon as their gradients are there
        optimizer.step()            # waits for the rest, then steps; a step that is not finite is left out

    Names come from `model` or from `named_parameters`; parameters, and a model's buffers, start as those of
    rank 0. `backward_passes` of them make a step. Call synchronize() before clipping, and before a GradScaler's
    step(). Keywords beyond those named are in oktopk.Settings.

    It is an Optimizer itself: schedulers, param_groups, state_dict and closures work. The loss that a closure
    returns becomes the mean over ranks, so that all ranks decide alike.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        compressor: str | Algorithm = "oktopk",
        density: float = 0.01,
        warmup_steps: int = 128,
        norm_clip: float | None = None,
        *,
        model: nn.Module | None = None,
        comm: Communicator | None = None,
        backward_passes: int = 1,
        broadcast: bool = True,
        buckets: BucketPlan = DEFAULT_BUCKET_MB,
        auto: bool = True,
        grad_scaler: Scaler | None = None,
        trainer: Any = None,
        sinks: Iterable[MetricsSink] = (),
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if backward_passes < 1:
            raise ValueError(f"backward_passes must be at least 1, got {backward_passes}")
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._link()
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        self._named = name_parameters(optimizer, named_parameters)
        self.reducer = AllReducer(
            self._named.items(), compressor, density, comm, trainer, warmup_steps=warmup_steps, buckets=buckets,
            auto=auto, norm_clip=norm_clip, grad_scaler=grad_scaler, sinks=sinks, timeout=timeout, **options,
        )  # fmt: skip
        self.reducer.check_momentum(optimizer)
        self._backward_passes = backward_passes
        self._synchronized = False
        self._lock = threading.Lock()  # with several devices, hooks run in several threads
        self._handles: list[RemovableHandle] = []
        self._listen(self._named)
        self._expect()
        if broadcast:
            self.broadcast(model)

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
        self._bucket_of = {name: bucket for bucket in self.reducer.buckets for name in bucket.names}
        self._incomplete = {bucket: len(bucket.names) for bucket in self.reducer.buckets}
        self._waiting: list[Bucket] = list(self.reducer.buckets)

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
            if self.reducer.settings.norm_clip is None:  # otherwise the norm of all gradients is needed first
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Hand over complete buckets, but in the one order that all ranks follow."""
        while self._waiting and self._incomplete[self._waiting[0]] == 0:
            bucket = self._waiting.pop(0)
            self.reducer.submit_named(bucket, {name: self._named[name].grad for name in bucket.names})

    @property
    def _under_way(self) -> bool:
        return len(self._waiting) < len(self.reducer.buckets)

    def synchronize(self) -> StepEvent:
        """Wait until all gradients are averaged; missing ones count as zeros. step() then goes on from here.

        Called again before the next backward pass, it changes nothing.
        """
        if self._synchronized and self.reducer.last is not None:
            return self.reducer.last
        grads = {name: parameter.grad for name, parameter in self._named.items()}
        factor = self.reducer.clip_factor(grad for grad in grads.values() if grad is not None)
        while self._waiting:
            self.reducer.submit_named(self._waiting.pop(0), grads, factor)
        averaged = self.reducer.finish_named(grads)
        for name, parameter in self._named.items():
            parameter.grad = averaged[name]
        self._expect()
        self._synchronized = True
        assert self.reducer.last is not None
        return self.reducer.last

    # What an optimizer does.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what is not averaged yet, and step. A step with numbers that are not finite changes nothing."""
        if closure is not None:
            return self.inner.step(self._with_average(closure))
        if not self._synchronized:
            if self.reducer.scaled:
                raise RuntimeError("call optimizer.synchronize() after backward, before GradScaler.step()")
            self.synchronize()
        self._synchronized = False
        return None if self.reducer.skipped else self.inner.step()

    def _with_average(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            if self.reducer.skipped:
                self.zero_grad()
            if loss is None:
                return None
            mean = torch.as_tensor(loss).detach().clone().to(torch.float32).reshape(1).cpu()
            self.reducer.run(lambda comm: comm.all_reduce_(mean, "loss", control=True))
            return mean.div_(self.reducer.world).to(torch.as_tensor(loss).device).squeeze(0)

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
        self.reducer.abandon()
        self._expect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters that join later are reduced in buckets of their own."""
        if not hasattr(self, "reducer"):  # while Optimizer.__init__ runs
            super().add_param_group(param_group)
            return
        if self._under_way:
            raise RuntimeError("gradients are being averaged: add parameters after step()")
        self.inner.add_param_group(param_group)
        self._link()
        every = name_parameters(self.inner, ((name, p) for name, p in self._named.items()), strict=False)
        new = {name: parameter for name, parameter in every.items() if name not in self._named}
        self.reducer.extend(new)
        self._named |= new
        self._listen(new)
        self._expect()
        self.reducer.run(lambda comm: broadcast_tensors(comm, new))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "oktopk" what this rank keeps back: every rank saves its own."""
        return {**self.inner.state_dict(), "oktopk": self.reducer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); one of a plain optimizer will do, then residuals start at zero."""
        own = {key: value for key, value in state_dict.items() if key != "oktopk"}
        if "oktopk" in state_dict:
            self.reducer.load_state_dict(state_dict["oktopk"])
            self._expect()
        self.inner.load_state_dict(own)
        self._link()

    def _link(self) -> None:
        """Groups and state are those of the inner optimizer, not copies."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    # What the reducer does.

    def broadcast(self, model: nn.Module | None = None) -> None:
        """Give all ranks the parameters of rank 0, and the buffers of a model."""
        tensors: dict[str, Tensor] = dict(self._named)
        if model is not None:
            tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
        self.reducer.run(lambda comm: broadcast_tensors(comm, tensors))

    def set_trainer(self, trainer: Any) -> None:
        """Fill trainer.sparsities, .compression_ratios, .communication_sizes from now on: one entry per step."""
        self.reducer.set_trainer(trainer)

    def add_sink(self, sink: MetricsSink) -> None:
        self.reducer.add_sink(sink)

    def stats(self) -> dict[str, float]:
        return self.reducer.stats()

    def close(self) -> None:
        """Let go of the parameters and end the worker thread; the inner optimizer can be used on."""
        for handle in self._handles:
            handle.remove()
        self.reducer.close()

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
