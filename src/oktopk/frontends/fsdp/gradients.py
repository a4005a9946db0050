"""Sharded gradients: which have come in a backward pass, and units that are handed over in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from ...engine.async_reducer import AsyncReducer
from ...engine.worker import Job
from ...feedback.buckets import Bucket, flatten, make_buckets
from .ranks import local
from .units import distribute_like


class ShardedGradients:
    """The gradients of one backward pass. Buckets are units, and have the entries of this rank's shards alone.

    A unit's gradients are copied into flat memory of their own, of which they are views from then on: the padding
    that FSDP has between shards stays behind, and its memory is free. So there is no more than one unit twice.

    Args:
        parameters: the model's, by name.
        units: the names of each unit's parameters, in the order of backward.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], units: Sequence[Sequence[str]]) -> None:
        self.parameters, self._units = dict(parameters), units
        self._required: list[bool] = []
        self.buckets: tuple[Bucket, ...] = ()
        self._bucket_of: dict[str, Bucket] = {}
        self.expect()

    def expect(self) -> None:
        """A new backward pass: every gradient is to come. Parameters may have been frozen or unfrozen."""
        required = [parameter.requires_grad for parameter in self.parameters.values()]
        if required != self._required:
            self._required = required
            self.buckets = self._form_buckets()
            self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._to_come = {bucket: {*bucket.names} for bucket in self.buckets}
        self._waiting = list(self.buckets)
        self.flats: dict[Bucket, Tensor] = {}
        """What was handed over, and after the step the results."""

    def _form_buckets(self) -> tuple[Bucket, ...]:
        used = {name: local(p) for name, p in self.parameters.items() if p.requires_grad}
        return make_buckets(
            {name: part.numel() for name, part in used.items()},
            [names for unit in self._units if (names := [name for name in unit if name in used])],
            {name: (part.dtype, part.device) for name, part in used.items()},
        )

    @property
    def complete(self) -> bool:
        """Whether all gradients have come."""
        return not any(self._to_come.values())

    def add(self, name: str) -> None:
        """Note that a gradient has come; one that was unfrozen in the middle of a pass is left out."""
        bucket = self._bucket_of.get(name)
        if bucket is not None:
            self._to_come[bucket].discard(name)

    def submit_complete(self, engine: AsyncReducer) -> None:
        """Hand over complete units, but in the one order that all ranks follow."""
        while self._waiting and not self._to_come[self._waiting[0]]:
            self._submit(engine, self._waiting.pop(0))

    def submit_rest(self, engine: AsyncReducer, factor: float) -> None:
        """Hand over all that is left, scaled by `factor`; missing gradients count as zeros."""
        while self._waiting:
            self._submit(engine, self._waiting.pop(0), factor)

    @torch.no_grad()
    def scale(self, parameters: Set[Tensor], factor: float) -> None:
        """Multiply the results of units that have these parameters."""
        for bucket, flat in self.flats.items():
            if self.parameters[bucket.names[0]] in parameters:
                flat.mul_(factor)

    def local_grads(self) -> list[Tensor]:
        """This rank's shards of the gradients that have come."""
        found = (self.parameters[name].grad for bucket in self.buckets for name in bucket.names)
        return [local(grad) for grad in found if grad is not None]

    @torch.no_grad()
    def _submit(self, engine: AsyncReducer, bucket: Bucket, factor: float = 1.0) -> None:
        named = {name: self.parameters[name] for name in bucket.names}
        like = local(named[bucket.names[0]])
        flat = self.flats[bucket] = torch.empty(bucket.size, dtype=like.dtype, device=like.device)
        flatten(bucket, {name: None if p.grad is None else local(p.grad) for name, p in named.items()}, flat)
        if factor != 1.0:
            flat.mul_(factor)
        for name, place in bucket.places.items():
            parameter = named[name]
            parameter.grad = distribute_like(flat[place].view(local(parameter).shape), parameter)
        engine.submit(bucket, flat, _when_copied(flat))


def _when_copied(flat: Tensor) -> Job | None:
    """What lets the thread that reduces wait for the copy: on a GPU, FSDP reduces in a stream of its own."""
    if not flat.is_cuda:
        return None
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return copied.wait
