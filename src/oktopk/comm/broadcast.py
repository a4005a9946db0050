"""The same initial tensors on all ranks: those of rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import WireError
from . import Communicator, Digest, agree, post_digest
from .messages import broadcast_relays
from .transport import format_ranks

_CHUNK_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors (parameters, buffers) with those of rank 0, in place. All ranks call it together.

    Ranks pass the tensors on, and compare a digest of them at the end.

    Args:
        comm: The ranks.
        tensors: Tensors of any type by name; names, shapes and types must be the same on all ranks.

    Raises:
        ValueError: Names, shapes or types differ between ranks.
        WireError: A rank received something else than the others, or than the tensors need.

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
    digest = Digest()
    for chunk in _chunks(list(tensors.values())):
        size = sum(tensor.nbytes for tensor in chunk)
        own = torch.cat([_bytes(tensor) for tensor in chunk]) if comm.rank == 0 else None
        received = comm.broadcast_sealed(own, size, "start")
        if received.numel() != size:
            raise WireError(f"broadcast (start): {received.numel()} bytes from {_route(comm)}, expected {size}")
        digest.add(received)
        for tensor, part in zip(chunk, torch.split(received, [t.nbytes for t in chunk]), strict=True):
            if comm.rank:
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
    post_digest(comm, digest, "the initial tensors", "Start again")()


def _route(comm: Communicator) -> str:
    """The rank that broadcasts, and those that passed its message on to this one."""
    relays = [comm.global_rank(rank) for rank in broadcast_relays(comm.rank)]
    passed_on = f", passed on by {format_ranks(relays)}" if relays else ""
    return f"rank {comm.global_rank(0)}{passed_on}"


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
