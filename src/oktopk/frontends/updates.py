"""Local steps: what a rank's optimizer adds to the parameters, where they are, weight decay, averaged moments."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm import Communicator, agree
from ..feedback.buckets import Bucket, flatten, unflatten
from .bucketed import BucketedGradients

_DECOUPLED = tuple(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
"""Optimizers that decouple weight decay, besides those whose groups say so (AdamW, Adam, NAdam, RAdam)."""
_WIDE = (torch.float32, torch.float64)
"""Parameters that can hold a residual: those of 16 bits would round it in every step."""


class LocalUpdates:
    """A round of local steps: from parameters that all ranks have in common to those of this rank alone.

        θ_common ─ decoupled weight decay ─► base         the same on all ranks
        θ_local = θ_common + residual ─ decay, this rank's optimizer ─► θ_now

        update = θ_now − base − residual, in float32
        θ_common' = base + the mean of what was sent, on all ranks to the bit;   θ_local' = θ_common' + residual'

    Between rounds parameters are at θ_local, so that gradients already see what this rank has not sent yet; after
    `move_to_common()`, and where there is no residual, at θ_common. Weight decay acts on all parameters at every
    step, so that `base` is known to all ranks and has no need to be sent. Over several steps it is
    base = θ_common · Π (1 − lr · weight_decay).

    Args:
        residual: what this rank keeps back of a bucket; None if there is nothing.
        lr_scale: factor of the learning rate in local steps; not of weight decay.
    """

    def __init__(self, residual: Callable[[Bucket], Tensor | None], lr_scale: float = 1.0) -> None:
        self.steps = 0
        """Local steps since the round began; 0 between rounds."""
        self.taken = False
        """Whether the optimizer has stepped in this round: it does not with gradients that are not finite."""
        self._residual, self._lr_scale = residual, lr_scale
        self._local: set[str] = set()
        """The parameters that are at θ_local, or have begun the round there."""
        self._buckets: tuple[Bucket, ...] = ()
        self._parameters: dict[str, Tensor] = {}
        self._common: dict[str, Tensor] = {}
        self._group_of: dict[str, int] = {}
        self._factors: list[float] = []
        """By group: what remains of θ_common."""

    @property
    def apart(self) -> bool:
        """Whether parameters differ from rank to rank."""
        return bool(self.steps or self._local)

    def begin(
        self,
        named: Mapping[str, Tensor],
        parts: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        optimizer: Optimizer,
    ) -> None:
        """Begin a round; parameters that are not at θ_local are the same on all ranks.

        Args:
            named: the parameters by name.
            parts: what this rank has of them.
            buckets: those of the round.
            optimizer: this rank's.
        """
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._parameters, self._buckets = {name: parts[name] for name in named}, tuple(buckets)
        self._group_of = {name: groups[id(p)] for name, p in named.items()}
        self._factors = [1.0] * len(optimizer.param_groups)
        self._common = {
            name: self._common[name] if name in self._local else self._copy(name, p)
            for name, p in self._parameters.items()
        }

    def _copy(self, name: str, parameter: Tensor) -> Tensor:
        """A copy of the parameter, in the memory of the last round if possible."""
        held = self._common.get(name)
        if held is None or held.dtype != parameter.dtype or held.device != parameter.device:
            return parameter.detach().clone()
        return held.copy_(parameter)

    def move_to_local(self) -> None:
        """Add to θ_common what this rank keeps back."""
        self._local = set()
        for bucket in self._buckets:
            kept = self._residual(bucket)
            for name, place in bucket.places.items():
                parameter = self._parameters[name]
                if kept is None or parameter.dtype not in _WIDE:
                    parameter.copy_(self._common[name])
                else:
                    torch.add(self._common[name], kept[place].view(parameter.shape), out=parameter)
                    self._local.add(name)

    def move_to_common(self) -> None:
        """Give this rank, between rounds, the parameters that all ranks have in common."""
        for name in self._local:
            self._parameters[name].copy_(self._common[name])
        self._local = set()

    def step(self, optimizer: Optimizer, finite: bool) -> None:
        """Let this rank's optimizer step; only weight decay acts if its gradients are not finite."""
        self.steps += 1
        factors = decay_factors(optimizer)
        self._factors = [before * now for before, now in zip(self._factors, factors, strict=True)]
        for name, parameter in self._parameters.items():
            if (factor := factors[self._group_of[name]]) != 1.0:
                parameter.mul_(factor)
        if finite:
            with _locally(optimizer, self._lr_scale):
                optimizer.step()
            self.taken = True

    def _base(self, name: str) -> Tensor:
        factor = self._factors[self._group_of[name]]
        return self._common[name] if factor == 1.0 else self._common[name] * factor

    def write(self, bucket: Bucket, flat: Tensor) -> None:
        """Write the updates of a bucket."""
        kept = self._residual(bucket)
        for name, place in bucket.places.items():
            parameter = self._parameters[name]
            wide = torch.promote_types(parameter.dtype, flat.dtype)
            update = flat[place].view(parameter.shape)
            torch.sub(parameter.to(wide), self._base(name).to(wide), out=update)
            if kept is not None and name in self._local:
                update.sub_(kept[place].view(parameter.shape))

    def apply(self, mean: Callable[[Bucket], Tensor]) -> None:
        """End the round: add the mean of what was sent to what all ranks have in common."""
        for bucket in self._buckets:
            flat = mean(bucket)
            for name, place in bucket.places.items():
                common = self._common[name]
                torch.add(self._base(name), flat[place].view(common.shape), out=common)
        self.move_to_local()
        self._end()

    def restore(self) -> None:
        """End the round without a result: θ_common is what it was, and residuals have what they have."""
        if self.steps:
            self.move_to_local()
        self._end()

    def forget(self) -> None:
        """End the round: the parameters are the same on all ranks, from elsewhere."""
        self._local = set()
        self._end()

    def _end(self) -> None:
        self.steps, self.taken = 0, False

    def describe_decay(self, optimizer: Optimizer) -> tuple[int, list[float]]:
        """What ranks must agree on before the round ends, and a digest of it: the decay with the next step's."""
        factors = [*(self._factors if self.steps else ()), *decay_factors(optimizer)]
        return zlib.crc32(struct.pack(f"{len(factors)}d", *factors)), factors


# Decoupled weight decay.


def decay_factors(optimizer: Optimizer) -> list[float]:
    """By group: the factor by which a step's decoupled weight decay shrinks the parameters."""
    return [
        1.0 - float(group["lr"]) * float(group["weight_decay"]) if _decouples(optimizer, group) else 1.0
        for group in optimizer.param_groups
    ]


def _decouples(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay acts on the parameters themselves, and not through the gradients."""
    return bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, _DECOUPLED)


@contextmanager
def _locally(optimizer: Optimizer, lr_scale: float) -> Iterator[None]:
    """A block in which the optimizer does no decoupled weight decay, and scales its learning rates."""
    kept = [dict(group) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            if lr_scale != 1.0:
                group["lr"] = group["lr"] * lr_scale
            if _decouples(optimizer, group):
                group["weight_decay"] = 0.0
        yield
    finally:
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group |= {key: before[key] for key in ("lr", "weight_decay") if key in before}


# Moments.


@torch.no_grad()
def average_state(
    comm: Communicator, gradients: BucketedGradients, states: Mapping[str, Mapping[str, Any]], key: str, owner: str
) -> None:
    """Average one kind of optimizer state, such as "exp_avg_sq", over all ranks. All ranks call it together.

    Args:
        comm: the ranks.
        gradients: the parameters in buckets, whose memory is used; no step may be under way.
        states: the optimizer's, by the name of the parameter; of a sharded one, this rank's part.
        key: the name of the state, which has the shape of its parameter.
        owner: the name of the optimizer.
    """
    held = {name: states.get(name, {}).get(key) for name in gradients.names}
    found = {name: state for name, state in held.items() if state is not None}
    problem = None
    for name, state in found.items():
        if not isinstance(state, Tensor) or state.shape != gradients.parameters[name].shape:
            problem = f"averaged_state: {key!r} of {name} does not have the shape of the parameter"
    if not found and states:
        known = sorted({known for state in states.values() for known in state})
        problem = f"averaged_state: {owner} has no {key!r}; choose from {', '.join(known)}"
    agree(comm, {f"parameters with {key}": list(found)}, problem)
    for bucket in gradients.buckets:
        if not found.keys().isdisjoint(bucket.names):
            flat = gradients.flat(bucket)
            flatten(bucket, found, flat)
            comm.all_reduce_(flat.div_(comm.world), "optimizer state")
            unflatten(bucket, flat, found)
