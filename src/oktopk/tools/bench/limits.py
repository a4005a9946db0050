"""Lower limits on a step without overlap: one pass over memory, and its bytes over the link."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .steps import TimedStep, time_step


class MemoryLimit:
    """Times residual += gradient over all entries: the least that must be read and written."""

    def __init__(self, size: int, in_lab: bool) -> None:
        self.in_lab = in_lab
        self.residual, self.gradient = torch.zeros(size), torch.ones(size)

    def step(self) -> TimedStep:
        return time_step(lambda: self.residual.add_(self.gradient), self.in_lab)

    def close(self) -> None:
        """Nothing to close."""


class LinkLimit:
    """Times plain gloo sends and receives of as many bytes as a contender sent in the same step.

    The bytes are sent at once in equal parts to all ranks, without encoding: only the link takes time.
    """

    def __init__(self, sent: Callable[[], int], in_lab: bool) -> None:
        self.sent, self.in_lab = sent, in_lab

    def step(self) -> TimedStep:
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.all_reduce(total := torch.tensor(self.sent()))
        share = int(total) // (world * max(1, world - 1))
        outgoing = torch.ones(share, dtype=torch.uint8)
        incoming = {peer: torch.ones_like(outgoing) for peer in range(world) if peer != rank}

        def run() -> None:
            works = [dist.irecv(buffer, peer) for peer, buffer in incoming.items()]
            works += [dist.isend(outgoing, peer) for peer in incoming]
            for work in works:
                if work is not None:  # None for ranks outside the group
                    work.wait()

        return time_step(run, self.in_lab)

    def close(self) -> None:
        """Nothing to close."""
