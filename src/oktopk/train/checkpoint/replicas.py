"""All ranks train the same model: making sure of it, and making it so where it is not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from oktopk.comm import Communicator, gather_json
from oktopk.errors import OkTopkError


class ReplicaError(OkTopkError):
    """Ranks no longer have the same parameters."""


def checksum(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_replicas(comm: Communicator, model: nn.Module, when: str) -> None:
    """Raise on all ranks if the parameters are not the same to the bit."""
    sums = gather_json(comm, checksum(model.parameters()), "replicas")
    strange = [rank for rank, value in enumerate(sums) if value != sums[0]]
    if strange:
        ranks = ", ".join(map(str, strange))
        raise ReplicaError(f"{when}: the parameters of rank {ranks} are not those of rank 0: {sums}")


@torch.no_grad()
def average_buffers(comm: Communicator, model: nn.Module) -> None:
    """Running statistics are of each rank's own batches: give all ranks their mean, so that they validate and
    save the same model."""
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()]
    if comm.world == 1 or not floating:
        return
    flat = torch.cat([buffer.detach().reshape(-1).float().cpu() for buffer in floating]) / comm.world
    comm.all_reduce_(flat, "buffers", control=True)
    parts = torch.split(flat, [buffer.numel() for buffer in floating])
    for buffer, part in zip(floating, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


class Buffers:
    """The model's buffers as they were, to go back to when a step is left out."""

    def __init__(self, model: nn.Module) -> None:
        self._live: Mapping[str, Tensor] = dict(model.named_buffers())
        self._kept = {name: buffer.detach().clone() for name, buffer in self._live.items()}

    @torch.no_grad()
    def keep(self) -> None:
        for name, buffer in self._live.items():
            self._kept[name].copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        for name, buffer in self._live.items():
            buffer.copy_(self._kept[name])
