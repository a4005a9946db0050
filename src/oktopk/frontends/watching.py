"""What the DDP front end watches from step to step: the model it is registered with, and guarded optimizers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp="python_reducer" calls hooks without buckets: use the default, True, and '
    "make the DistributedDataParallel model again"
)
_HALF_A_STEP = (
    "interrupted mid-step: optimizer.step() has not finished, and this rank may have diverged. Restart from the "
    "last checkpoint"
)


def model_problem(model: Any) -> str | None:
    """Why the hook cannot work with a DDP model; None if it can."""
    if not hasattr(model, "register_comm_hook"):
        return f"register needs the DistributedDataParallel model, got {type(model).__name__}"
    if getattr(model, "mixed_precision", None) is not None:
        return (
            "DistributedDataParallel(mixed_precision=…) has a communication hook of its own: use torch.autocast, "
            "or a 16-bit model"
        )
    return _PYTHON_REDUCER if getattr(model, "_use_python_reducer", False) else None


def bucket_problem(bucket: Any) -> str | None:
    """Why what DDP delivers cannot be averaged; None if it can."""
    if not hasattr(bucket, "buffer"):
        return _PYTHON_REDUCER
    if bucket.buffer().is_sparse:
        return "unsupported sparse gradients: use sparse=False in nn.Embedding and nn.EmbeddingBag"
    return None


def unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer inside of a wrapper such as Accelerate's."""
    while not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        if not hasattr(optimizer, "optimizer"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        optimizer = optimizer.optimizer
    return optimizer


def calling_scaler() -> GradScaler | None:
    """The GradScaler whose step() has called this optimizer, if there is one and it is enabled.

    GradScaler.step() does not tell an optimizer who calls. Its frame knows the scaler itself, and so the scale of
    the gradients, whatever was done to them since.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals["self"]
    return scaler if scaler is not None and scaler.is_enabled() else None


class ModelWatch:
    """Notices that parameters were frozen or unfrozen, which DistributedDataParallel does not."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        ignored = getattr(model, "parameters_to_ignore", ())
        self._named = [(name, p) for name, p in model.module.named_parameters() if name not in ignored]
        self._required = self._flags()

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._named]

    @property
    def joins(self) -> bool:
        """Whether ranks may run out of data: DDP then delivers buckets for them, and no optimizer steps."""
        return bool(getattr(getattr(self._model(), "_join_config", None), "enable", False))

    def problem(self) -> str | None:
        """What has changed since the model was registered, if it matters."""
        if (flags := self._flags()) == self._required:
            return None
        unused_is_fine = getattr(self._model(), "find_unused_parameters", False)
        again = "after the DistributedDataParallel model was made"
        for (name, _), before, now in zip(self._named, self._required, flags, strict=True):
            if now and not before:
                return f"{name} was unfrozen {again}, which does not average it: wrap the model again"
            if before and not now and not unused_is_fine:
                return (
                    f"{name} was frozen {again}, which waits for its gradient: wrap the model again, or pass "
                    "find_unused_parameters=True"
                )
        return None


@dataclass(frozen=True)
class GuardHandle:
    """Ends a guard."""

    guard: OptimizerGuard
    hooks: Sequence[RemovableHandle]

    def remove(self) -> None:
        """The optimizer is not watched any more. Calling it twice is fine."""
        for hook in self.hooks:
            hook.remove()
        self.guard.handles = [other for other in self.guard.handles if other is not self]


class OptimizerGuard:
    """Lets a skipped step change nothing, and notices a step that an interrupt left out or did by half.

    Args:
        skipped: whether the last step was skipped.
        stepping: called before each step of an optimizer, with the GradScaler that takes it, if there is one.
    """

    def __init__(
        self, skipped: Callable[[], bool], stepping: Callable[[GradScaler | None], None] = lambda _: None
    ) -> None:
        self._skipped, self._stepping = skipped, stepping
        self.handles: list[GuardHandle] = []
        self.applied = True
        """Whether the optimizer has stepped since gradients were averaged."""
        self._unfinished = False
        self._stepped = False

    @property
    def waits(self) -> bool:
        """Whether it is not known yet if a GradScaler is at work: no guarded optimizer has stepped so far."""
        return bool(self.handles) and not self._stepped

    def watch(self, optimizer: Optimizer) -> GuardHandle:
        hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )
        handle = GuardHandle(self, hooks)
        self.handles.append(handle)
        return handle

    def reset(self) -> None:
        """Forget a step of the past: all ranks have loaded a state."""
        self.applied, self._unfinished = True, False

    def check(self) -> None:
        """Raise if the optimizer has begun a step and not ended it."""
        if self._unfinished:
            raise RuntimeError(_HALF_A_STEP)

    def _before(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._stepped = True
        self._stepping(calling_scaler())
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._unfinished = closure is None  # a closure averages gradients inside of the step
        if self._skipped():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _after(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._unfinished, self.applied = False, True
