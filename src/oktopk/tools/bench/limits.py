"""What a contender costs at least if nothing is hidden: one pass over memory, and its own bytes over the link."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .turns import Turn, take_turn


class MemoryLimit:
    """residual += gradient, once, over all entries: what must be read and written at least."""

    def __init__(self, size: int, in_lab: bool) -> None:
        self.in_lab = in_lab
        self.residual, self.gradient = torch.zeros(size), torch.ones(size)

    def turn(self) -> Turn:
        return take_turn(lambda: self.residual.add_(self.gradient), self.in_lab)

    def close(self) -> None:
        """Nothing to end."""


class LinkLimit:
    """As many bytes as somebody has sent in the same step, by plain sends and receives of gloo between all ranks.

    They go out at once and in equal parts, and are neither made nor looked at: what is left is the link.
    """

    def __init__(self, sent: Callable[[], int], in_lab: bool) -> None:
        self.sent, self.in_lab = sent, in_lab

    def turn(self) -> Turn:
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.all_reduce(total := torch.tensor(self.sent()))
        share = int(total) // (world * max(1, world - 1))
        outgoing = torch.ones(share, dtype=torch.uint8)
        incoming = {peer: torch.ones_like(outgoing) for peer in range(world) if peer != rank}

        def run() -> None:
            works = [dist.irecv(buffer, peer) for peer, buffer in incoming.items()]
            works += [dist.isend(outgoing, peer) for peer in incoming]
            for work in works:
                if work is not None:  # None for ranks that are not of the group
                    work.wait()

        return take_turn(run, self.in_lab)

    def close(self) -> None:
        """Nothing to end."""
