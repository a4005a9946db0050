"""Memory that belongs to parameters from step to step: residuals, and velocities for momentum correction."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..utils.streams import streams_of
from .buckets import Bucket


class ResidualStore:
    """One float32 per parameter entry, zero at first, stored flat by bucket and keyed by parameter name.

    When a parameter moves to another bucket (DDP rebuilds its buckets after the first step), its residual moves
    along. Memory is allocated on first use.
    """

    def __init__(self) -> None:
        self._flat: dict[Bucket, Tensor] = {}
        self._by_name: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self._by_name)

    def get(self, bucket: Bucket, device: torch.device | None = None) -> Tensor | None:
        """The memory of a bucket, or None if it was never used."""
        if not self._by_name or (bucket not in self._flat and self._by_name.keys().isdisjoint(bucket.names)):
            return None
        return self.flat(bucket, device)

    def flat(self, bucket: Bucket, device: torch.device | None = None) -> Tensor:
        """The memory of a bucket, allocated if necessary."""
        if bucket not in self._flat:
            self._lay_out(bucket, device)
        return self._flat[bucket]

    def drop(self, bucket: Bucket) -> None:
        """Free the memory of a bucket, which must be all zeros."""
        self._flat.pop(bucket, None)
        for name in bucket.names:
            self._by_name.pop(name, None)

    def _lay_out(self, bucket: Bucket, device: torch.device | None) -> None:
        found = [self._by_name[name] for name in bucket.names if name in self._by_name]
        if device is None and found:
            device = found[0].device
        flat = torch.zeros(bucket.size, dtype=torch.float32, device=device)
        for name, place in bucket.places.items():
            known = self._by_name.get(name)
            if known is not None and known.numel() != place.stop - place.start:
                raise ValueError(
                    f"what is kept of {name} has {known.numel()} entries, the parameter {place.stop - place.start}"
                )
            if known is not None:
                streams_of(known).keep(known)  # a checkpoint was loaded on another stream
                flat[place].copy_(known)
            self._by_name[name] = flat[place]
        moved = set(bucket.names)
        for old in [old for old in self._flat if not moved.isdisjoint(old.names)]:
            del self._flat[old]
            for name in set(old.names) - moved:  # a view would keep all of the old memory
                self._by_name[name] = self._by_name[name].clone()
        self._flat[bucket] = flat

    def state_dict(self) -> dict[str, Tensor]:
        for part in self._by_name.values():
            streams_of(part).keep(part)
        return {name: part.clone() for name, part in self._by_name.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        self._flat = {}
        self._by_name = {
            name: part.detach().to(torch.float32, copy=True).flatten() for name, part in saved.items()
        }
