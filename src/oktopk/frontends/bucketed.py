"""Named gradients in buckets: what the all-reducer and the wrapped optimizer share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..engine.async_reducer import AsyncReducer
from ..engine.state_dict import saved_layout
from ..feedback.buckets import Bucket, BucketPlan, flatten, layout_mismatch, make_buckets, unflatten


class BucketedGradients:
    """Copies named gradients into flat buckets for the engine, and the results back."""

    def __init__(self, parameters: Mapping[str, Tensor], plan: BucketPlan) -> None:
        self.parameters = dict(parameters)
        self.buckets = make_buckets(self._sizes(), plan, _kinds(self.parameters))
        self._flat: dict[Bucket, Tensor] = {}

    def submit(
        self, engine: AsyncReducer, bucket: Bucket, grads: Mapping[str, Tensor | None], factor: float = 1.0
    ) -> None:
        """Submit the gradients of a bucket, scaled by `factor`; a missing one counts as zeros."""
        flat, held = self._flat_for(bucket), {name: grads.get(name) for name in bucket.names}

        @torch.no_grad()
        def fill() -> None:
            flatten(bucket, held, flat)
            if factor != 1.0:
                flat.mul_(factor)

        engine.submit(bucket, flat, fill)

    @torch.no_grad()
    def finish(self, engine: AsyncReducer, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Wait for the step, and put the results where the gradients were; missing ones are made."""
        engine.finish()
        result = {}
        for bucket in self.buckets:
            flat = self._flat_for(bucket)
            unflatten(bucket, flat, grads)
            for name, place in bucket.places.items():
                grad = grads.get(name)
                made = grad if grad is not None else flat[place].view(self.parameters[name].shape).clone()
                result[name] = made
        return result

    def extend(self, named_parameters: Mapping[str, Tensor]) -> None:
        """Add parameters, in buckets of their own after the others."""
        self.parameters |= named_parameters
        new = {name: p.numel() for name, p in named_parameters.items() if p.requires_grad}
        self.buckets += make_buckets(new, kinds=_kinds(self.parameters)) if new else ()

    def load_state_dict(self, engine: AsyncReducer, saved: Mapping[str, Any]) -> None:
        """Go on in the buckets that the state_dict() was taken with."""
        self.read_state_dict(engine, saved)()

    def read_state_dict(self, engine: AsyncReducer, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state_dict() in full, and change nothing; the function that is returned takes it over."""
        layout = saved_layout(saved)
        if layout and (problem := layout_mismatch(layout, self._sizes())):
            raise ValueError(problem)
        take_over = engine.read_state_dict(saved, self._sizes())

        def apply() -> None:
            take_over()
            self.buckets = layout or self.buckets
            self._flat = {}

        return apply

    def _sizes(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self.parameters.items() if p.requires_grad}

    def _flat_for(self, bucket: Bucket) -> Tensor:
        if bucket not in self._flat:
            like = self.parameters[bucket.names[0]]
            self._flat[bucket] = torch.empty(bucket.size, dtype=like.dtype, device=like.device)
        return self._flat[bucket]


def check_pairs(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters by name; a TypeError if they are not pairs."""
    found = {}
    for pair in named_parameters:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError("named_parameters must be pairs of name and tensor: pass model.named_parameters()")
        found[pair[0]] = pair[1]
    return found


def _kinds(parameters: Mapping[str, Tensor]) -> dict[str, Hashable]:
    return {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
