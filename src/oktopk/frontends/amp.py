"""A GradScaler around LocalOptimizer: its scale comes off each rank's gradients, and all ranks lower it alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.async_reducer import Scaler
from ..wire.sparse_vector import all_finite


class AmpScaler(Scaler, Protocol):
    """torch.amp.GradScaler, with where it has noted whether gradients were infinite."""

    def _found_inf_per_device(self, optimizer: Optimizer) -> Mapping[Any, Tensor]: ...


def find_nonfinite(optimizer: Optimizer, scaler: AmpScaler | None, grads: Mapping[str, Tensor]) -> list[str]:
    """The gradients, by name, that are not finite after the scale is taken off them."""
    seen = _unscale(optimizer, scaler, list(grads.values()))
    found = [name for name, grad in grads.items() if not _is_finite(grad)]
    return found or (["a scaled gradient"] if seen else [])


def _unscale(optimizer: Optimizer, scaler: AmpScaler | None, grads: list[Tensor]) -> bool:
    """Take the scale off the gradients; whether the scaler has seen one that was not finite."""
    seen = getattr(optimizer, "found_inf", None)  # what GradScaler.step() sets, and removes afterwards
    if seen is None:
        if scaler is not None and scaler.is_enabled():
            raise RuntimeError("the gradients are scaled: call scaler.step(optimizer), not optimizer.step()")
        return False
    if scaler is None:
        raise RuntimeError("pass LocalOptimizer(grad_scaler=…), so that all ranks lower the scale together")
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None and grads:  # None if the user has called unscale_() before
        torch._foreach_mul_(grads, 1.0 / float(scale))
    return bool(seen)


def lower_scale(optimizer: Optimizer, scaler: AmpScaler | None) -> float | None:
    """Let the scaler lower its scale after a step that is skipped on all ranks; the scale of that step."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = float(scaler.get_scale())
    for seen in scaler._found_inf_per_device(optimizer).values():
        seen.fill_(1.0)
    return scale


def _is_finite(grad: Tensor) -> bool:
    return all_finite(grad._values() if grad.is_sparse else grad)
