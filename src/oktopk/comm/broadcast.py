"""The same initial tensors on all ranks: those of rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from . import Communicator, agree

_CHUNK_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors (parameters, buffers) with those of rank 0, in place. All ranks call it together.

    Args:
        comm: The ranks.
        tensors: Tensors of any type by name; names, shapes and types must be the same on all ranks.

    Example:
        >>> import oktopk
        >>> def start(comm):
        ...     weight = torch.full((2,), float(comm.rank + 7))
        ...     oktopk.broadcast_tensors(comm, {"weight": weight})
        ...     return weight.tolist()
        >>> oktopk.run_threads(2, start)
        [[7.0, 7.0], [7.0, 7.0]]
    """
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    agree(comm, {"tensors": shapes})
    if comm.world == 1:
        return
    for chunk in _chunks(list(tensors.values())):
        size = sum(tensor.nbytes for tensor in chunk)
        own = torch.cat([_bytes(tensor) for tensor in chunk]) if comm.rank == 0 else None
        received = comm.broadcast_sealed(own, size, "start")
        for tensor, part in zip(chunk, torch.split(received, [t.nbytes for t in chunk]), strict=True):
            if comm.rank:
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(t.nbytes for t in chunk) + tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk = []
        if tensor.numel():
            chunk.append(tensor)
    if chunk:
        yield chunk
