"""Compile the kernels before training starts, so that no step and no mean contains the compilation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from oktopk import DistributedOptimizer, LocalOptimizer, run_threads
from oktopk.comm import Communicator
from oktopk.engine.voice.speaking import hushed

from .sharded import ShardedOptimizer

_SIZES = (64, 10_000, 200_000)
_STEPS = 3
_RANKS = 2

AnyOptimizer = DistributedOptimizer | LocalOptimizer | ShardedOptimizer
"""What a run averages with: gradients, or updates."""
MakeOptimizer = Callable[[nn.Module, Communicator], AnyOptimizer]
"""Makes the run's optimizer for another model: sparse from the first step on."""


def rehearse(make_optimizer: MakeOptimizer, device: torch.device) -> None:
    """Train a stand-in for a few steps on ranks that are threads of this process: every kernel compiles.

    Args:
        make_optimizer: makes an optimizer with the settings of the run.
        device: of the model.
    """

    def rank(comm: Communicator) -> None:
        parameters = nn.ParameterList(nn.Parameter(torch.zeros(size, device=device)) for size in _SIZES)
        random = torch.Generator().manual_seed(comm.rank)
        with make_optimizer(parameters, comm) as optimizer:
            for _ in range(_STEPS):
                optimizer.zero_grad()
                _loss(parameters, random).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    with hushed():
        run_threads(_RANKS, rank)


def _loss(parameters: nn.ParameterList, random: torch.Generator) -> Tensor:
    """A loss with random gradients."""
    terms = [(one * torch.randn(one.shape, generator=random).to(one.device)).sum() for one in parameters]
    return torch.stack(terms).sum()
