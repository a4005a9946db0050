"""Check that all ranks have the same parameters, and average buffers that differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from oktopk.comm import Communicator, gather_json
from oktopk.errors import OkTopkError
from oktopk.frontends.fsdp.ranks import local


class ReplicaError(OkTopkError):
    """The parameters differ between ranks."""


def checksum(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = local(tensor).cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_replicas(comm: Communicator, model: nn.Module, when: str, shard: int = 1) -> None:
    """Raise on all ranks unless the parameters are identical to the bit: those of a shard, in all replicas."""
    sums = gather_json(comm, checksum(model.parameters()), "replicas")
    different = [rank for rank, value in enumerate(sums) if value != sums[rank % shard]]
    if different:
        ranks, first = ", ".join(map(str, different)), "rank 0" if shard == 1 else "the first replica"
        raise ReplicaError(f"{when}: the parameters of rank {ranks} differ from those of {first}: {sums}")


@torch.no_grad()
def average_buffers(comm: Communicator, model: nn.Module) -> None:
    """Average the buffers over ranks, so that all validate and save the same model.

    Running statistics come from each rank's own batches, so they differ.
    """
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.numel()]
    if comm.world == 1 or not floating:
        return
    flat = torch.cat([buffer.detach().reshape(-1).float().cpu() for buffer in floating]) / comm.world
    comm.all_reduce_(flat, "buffers", control=True)
    parts = torch.split(flat, [buffer.numel() for buffer in floating])
    for buffer, part in zip(floating, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


class BufferBackup:
    """A copy of the model's buffers, to restore when a step is skipped."""

    def __init__(self, model: nn.Module) -> None:
        self._live: Mapping[str, Tensor] = dict(model.named_buffers())
        self._copies = {name: buffer.detach().clone() for name, buffer in self._live.items()}

    @torch.no_grad()
    def save(self) -> None:
        for name, buffer in self._live.items():
            self._copies[name].copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        for name, buffer in self._live.items():
            buffer.copy_(self._copies[name])
