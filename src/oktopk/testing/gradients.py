"""Gradients that an algorithm must cope with: usual ones, and the edge cases of law 5."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[int, int], Tensor]
"""The gradient of a rank in a step."""
SIZE = 1009
SHAPES = {
    "one entry": (1, 0.5),
    "fewer entries than ranks": (3, 0.5),
    "k = 1": (50, 0.001),
    "k times P above n": (40, 0.5),
    "a prime": (SIZE, 0.03),
    "almost everything": (257, 0.97),
}
"""Sizes and densities, none of which is special."""


def heavy_tailed(size: int, seed: int = 0) -> Gradient:
    """Gradients of log-normal scale that drift, partly the same on all ranks."""

    def gradient(rank: int, step: int) -> Tensor:
        shared = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(seed + 1 + 1000 * rank + step)
        scale = torch.randn(size, generator=shared).exp() * (1.0 + 0.1 * step)
        return scale * (0.3 * torch.randn(size, generator=shared) + torch.randn(size, generator=own))

    return gradient


def zeros(rank: int, step: int) -> Tensor:
    return torch.zeros(SIZE)


def zeros_on_some(rank: int, step: int) -> Tensor:
    return heavy_tailed(SIZE)(rank, step) * (rank % 3 == 1)


def only_rank_0_in_one_place(rank: int, step: int) -> Tensor:
    x = torch.zeros(SIZE)
    x[700] = 1.0 if rank == 0 else 0.0
    return x


def cancelling(rank: int, step: int) -> Tensor:
    """Rank 2j+1 has the opposite of rank 2j: all sums are exactly zero at even P."""
    return heavy_tailed(SIZE)(rank // 2 * 2, step) * (1.0 if rank % 2 == 0 else -1.0)


def ties(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 17 * step)
    return torch.randint(0, 2, (SIZE,), generator=generator) * 2.0 - 1.0


def all_the_same(rank: int, step: int) -> Tensor:
    return torch.full((SIZE,), 0.25)


def all_in_one_region(rank: int, step: int) -> Tensor:
    x = torch.zeros(SIZE)
    x[-40:] = heavy_tailed(40)(rank, step)
    return x


def tiny_and_huge(rank: int, step: int) -> Tensor:
    return heavy_tailed(SIZE)(rank, step) * (1e-30 if step % 2 else 1e30)


def below_normal(rank: int, step: int) -> Tensor:
    return torch.full((SIZE,), 1e-41)


EDGE_CASES: dict[str, Gradient] = {
    function.__name__: function
    for function in (
        zeros, zeros_on_some, only_rank_0_in_one_place, cancelling, ties, all_the_same, all_in_one_region,
        tiny_and_huge, below_normal,
    )
}  # fmt: skip
"""Law 5: empty selections, exact cancellation, ties, everything in one place."""
