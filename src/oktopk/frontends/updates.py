"""Local steps: what a rank's optimizer adds to the parameters, decoupled weight decay, and averaged moments."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
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


class LocalUpdates:
    """A round of local steps: from parameters that all ranks have in common to those of this rank alone.

        θ_start ─ decoupled weight decay ─► base          the same on all ranks
                                            base ─ this rank's optimizer ─► θ_now

        update = θ_now − base, in float32;   θ_next = base + the mean of the updates, on all ranks to the bit

    Weight decay acts on all parameters at every step, so that `base` is known to all ranks and has no need to be
    sent. Over several steps it is base = θ_start · Π (1 − lr · weight_decay).
    """

    def __init__(self) -> None:
        self.steps = 0
        """Local steps since the round began; 0 between rounds."""
        self.taken = False
        """Whether the optimizer has stepped in this round: it does not with gradients that are not finite."""
        self._parameters: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}
        self._group_of: dict[str, int] = {}
        self._factors: list[float] = []
        """By group: what remains of θ_start."""

    def begin(self, named: Mapping[str, Tensor], parts: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Remember the parameters that all ranks have in common, as far as this rank has `parts` of them."""
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._parameters = {name: parts[name] for name in named}
        self._group_of = {name: groups[id(p)] for name, p in named.items()}
        self._factors = [1.0] * len(optimizer.param_groups)
        self._start = {name: self._copy(name, p) for name, p in self._parameters.items()}

    def _copy(self, name: str, parameter: Tensor) -> Tensor:
        """A copy of the parameter, in the memory of the last round if possible."""
        held = self._start.get(name)
        if held is None or held.dtype != parameter.dtype or held.device != parameter.device:
            return parameter.detach().clone()
        return held.copy_(parameter)

    def step(self, optimizer: Optimizer, finite: bool) -> None:
        """Let this rank's optimizer step; only weight decay acts if its gradients are not finite."""
        self.steps += 1
        factors = decay_factors(optimizer)
        self._factors = [before * now for before, now in zip(self._factors, factors, strict=True)]
        for name, parameter in self._parameters.items():
            if (factor := factors[self._group_of[name]]) != 1.0:
                parameter.mul_(factor)
        if finite:
            with _without_decay(optimizer):
                optimizer.step()
            self.taken = True

    def _base(self, name: str) -> Tensor:
        factor = self._factors[self._group_of[name]]
        return self._start[name] if factor == 1.0 else self._start[name] * factor

    def write(self, bucket: Bucket, flat: Tensor) -> None:
        """Write the updates of a bucket."""
        for name, place in bucket.places.items():
            parameter = self._parameters[name]
            wide = torch.promote_types(parameter.dtype, flat.dtype)
            update = flat[place].view(parameter.shape)
            torch.sub(parameter.to(wide), self._base(name).to(wide), out=update)

    def apply(self, bucket: Bucket, mean: Tensor) -> None:
        """Give the parameters of a bucket the mean of the updates."""
        for name, place in bucket.places.items():
            parameter = self._parameters[name]
            torch.add(self._base(name), mean[place].view(parameter.shape), out=parameter)

    def restore(self) -> None:
        """End the round with the parameters that it began with; weight decay is undone, too."""
        if self.steps:
            for name, parameter in self._parameters.items():
                parameter.copy_(self._start[name])
        self.end()

    def end(self) -> None:
        """End the round: the parameters are the same on all ranks."""
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
def _without_decay(optimizer: Optimizer) -> Iterator[None]:
    """A block in which the optimizer does no decoupled weight decay."""
    kept = [(group, group["weight_decay"]) for group in optimizer.param_groups if _decouples(optimizer, group)]
    try:
        for group, _ in kept:
            group["weight_decay"] = 0.0
        yield
    finally:
        for group, decay in kept:
            group["weight_decay"] = decay


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
