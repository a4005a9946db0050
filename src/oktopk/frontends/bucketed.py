"""Named gradients in buckets: what the all-reducer and the wrapped optimizer share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import agree
from ..engine.async_reducer import AsyncReducer
from ..engine.state_dict import saved_layout
from ..feedback.buckets import Bucket, BucketPlan, flatten, layout_mismatch, make_buckets, unflatten


class BucketedGradients:
    """Copies named gradients into flat buckets for the engine, and the results back.

    Buckets have the parameters that require a gradient. If that changes, follow() changes the buckets.

    Args:
        parameters: by name, in the order of the model.
        plan: how to form buckets.
        dtype: of the flat memory; by default that of the parameters.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], plan: BucketPlan, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self._dtype = dict(parameters), dtype
        self.buckets = make_buckets(self._sizes(), plan, _kinds(self.parameters))
        self._flat: dict[Bucket, Tensor] = {}
        self._followed: list[bool] = []
        """Which parameters required a gradient when follow() last looked."""

    @property
    def names(self) -> list[str]:
        """The parameters that are averaged."""
        return [name for bucket in self.buckets for name in bucket.names]

    @property
    def size(self) -> int:
        """The number of entries that are averaged."""
        return sum(bucket.size for bucket in self.buckets)

    def thawed(self) -> list[str]:
        """The parameters that require a gradient now, but are in no bucket."""
        unchanged = self._followed == self._flags()
        return [] if unchanged else sorted(self._sizes().keys() - set(self.names))

    def follow(self, engine: AsyncReducer) -> bool:
        """Follow, between steps, parameters that were frozen or unfrozen on all ranks; whether there were any.

        A frozen one leaves its bucket, and keeps its residual. Those that were unfrozen get buckets of their own.
        """
        flags = self._flags()
        if flags == self._followed:
            return False
        sizes = self._sizes()
        if sizes.keys() == set(self.names):
            self._followed = flags
            return False
        engine.run(lambda comm: agree(comm, {"parameters that require a gradient": list(sizes)}))
        if not sizes:
            raise ValueError("no parameter requires a gradient any more")
        new = {name: sizes[name] for name in sizes if name not in set(self.names)}
        self.buckets = tuple(kept for bucket in self.buckets if (kept := bucket.only(sizes)).names)
        self._add(new)
        self._flat, self._followed = {}, flags
        return True

    def _add(self, new: Mapping[str, int]) -> None:
        self.buckets += make_buckets(new, kinds=_kinds(self.parameters)) if new else ()

    def submit(
        self, engine: AsyncReducer, bucket: Bucket, grads: Mapping[str, Tensor | None], factor: float = 1.0
    ) -> None:
        """Submit the gradients of a bucket, scaled by `factor`; a missing one counts as zeros."""
        held = {name: grads.get(name) for name in bucket.names}

        def fill(flat: Tensor) -> None:
            flatten(bucket, held, flat)
            if factor != 1.0:
                flat.mul_(factor)

        self.submit_filled(engine, bucket, fill)

    def submit_filled(self, engine: AsyncReducer, bucket: Bucket, fill: Callable[[Tensor], object]) -> None:
        """Submit a bucket whose flat memory `fill` writes, in the thread that reduces it."""
        flat = self.flat(bucket)

        @torch.no_grad()
        def write() -> None:
            fill(flat)

        engine.submit(bucket, flat, write)

    @torch.no_grad()
    def finish(self, engine: AsyncReducer, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Wait for the step, and put the results where the gradients were; missing ones are made."""
        engine.finish()
        result = {}
        for bucket in self.buckets:
            flat = self.flat(bucket)
            unflatten(bucket, flat, grads)
            for name, place in bucket.places.items():
                grad = grads.get(name)
                made = grad if grad is not None else flat[place].view(self.parameters[name].shape).clone()
                result[name] = made
        return result

    def extend(self, named_parameters: Mapping[str, Tensor]) -> None:
        """Add parameters, in buckets of their own after the others."""
        self.parameters |= named_parameters
        self._add({name: p.numel() for name, p in named_parameters.items() if p.requires_grad})

    def load_state_dict(self, engine: AsyncReducer, saved: Mapping[str, Any]) -> None:
        """Go on in the buckets that the state_dict() was taken with."""
        self.read_state_dict(engine, saved)()

    def read_state_dict(self, engine: AsyncReducer, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state_dict() in full, and change nothing; the function that is returned takes it over."""
        layout = saved_layout(saved)
        # What was saved before it was frozen, or after it was unfrozen, follows in the next step.
        used = self._sizes().keys() | {name for bucket in layout for name in bucket.names}
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        if layout and (problem := layout_mismatch(layout, {name: sizes[name] for name in sizes if name in used})):
            raise ValueError(problem)
        take_over = engine.read_state_dict(saved, sizes)

        def apply() -> None:
            take_over()
            self.buckets = layout or self.buckets
            self._flat, self._followed = {}, []

        return apply

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def _sizes(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self.parameters.items() if p.requires_grad}

    def flat(self, bucket: Bucket) -> Tensor:
        """The flat memory of a bucket: what is submitted, and after the step the result."""
        if bucket not in self._flat:
            like = self.parameters[bucket.names[0]]
            dtype = like.dtype if self._dtype is None else self._dtype
            self._flat[bucket] = torch.empty(bucket.size, dtype=dtype, device=like.device)
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


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order of the model; without names they are numbered."""
    held = {
        parameter: f"group{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        return {name: parameter for parameter, name in held.items()}
    given = list(named_parameters)
    named = {name: parameter for name, parameter in given if parameter in held}
    if len(named) < len({parameter for _, parameter in given if parameter in held}):
        raise ValueError("two parameters have the same name: give names that are unique over all groups")
    unnamed = {name: parameter for parameter, name in held.items() if parameter not in set(named.values())}
    missing = [parameter for parameter in unnamed.values() if parameter.requires_grad]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the optimizer are not in named_parameters, the first of shape "
            f"{tuple(missing[0].shape)}: pass those of the whole model"
        )
    return named | unnamed
