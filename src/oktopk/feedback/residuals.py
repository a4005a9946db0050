"""Memory that stays with the parameters from step to step: residuals, and velocities for momentum correction."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from .buckets import Bucket


class ResidualStore:
    """One fp32 number per entry, zero at first, flat by bucket and known by parameter name.

    When parameters move to other buckets (DDP rebuilds its buckets after the first step), what they have comes
    along. Memory is taken when it is first needed.
    """

    def __init__(self) -> None:
        self._flat: dict[Bucket, Tensor] = {}
        self._by_name: dict[str, Tensor] = {}

    def peek(self, bucket: Bucket, device: torch.device | None = None) -> Tensor | None:
        """The memory of a bucket if any of it has ever been used."""
        if not self._by_name or (bucket not in self._flat and self._by_name.keys().isdisjoint(bucket.names)):
            return None
        return self.flat(bucket, device)

    def flat(self, bucket: Bucket, device: torch.device | None = None) -> Tensor:
        """The memory of a bucket."""
        if bucket not in self._flat:
            self._lay_out(bucket, device)
        return self._flat[bucket]

    def drop(self, bucket: Bucket) -> None:
        """Give back the memory of a bucket, which holds nothing but zeros."""
        self._flat.pop(bucket, None)
        for name in bucket.names:
            self._by_name.pop(name, None)

    def _lay_out(self, bucket: Bucket, device: torch.device | None) -> None:
        known = [self._by_name[name] for name in bucket.names if name in self._by_name]
        if device is None and known:
            device = known[0].device
        flat = torch.zeros(bucket.size, dtype=torch.float32, device=device)
        for name, place in bucket.places.items():
            if name in self._by_name:
                flat[place].copy_(self._by_name[name])
                _give_back(self._by_name[name])
            self._by_name[name] = flat[place]
        moved = set(bucket.names)
        self._flat = {old: memory for old, memory in self._flat.items() if moved.isdisjoint(old.names)}
        self._flat[bucket] = flat

    def state_dict(self) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self._by_name.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        self._flat = {}
        self._by_name = {
            name: part.detach().to(torch.float32, copy=True).flatten() for name, part in saved.items()
        }


def _give_back(part: Tensor) -> None:
    """Let the system have the pages of memory that is done with, though its neighbours may still be in use.

    DDP's first step has one bucket for the whole model. Without this, its memory would stay until the last
    parameter has moved to one of the buckets that follow, and there would be twice as much of it.
    """
    first = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (part.data_ptr() + part.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and part.is_cpu and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
