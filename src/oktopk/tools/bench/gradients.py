"""Synthetic gradients with realistic statistics, for measurements without a real network."""

from __future__ import annotations

import math

import torch


class Gradients:
    """Heavy-tailed gradients that drift: log-normal scale per layer, a mean that all ranks share, and noise per
    rank.

    The noise of a step is a window at a random offset of one long draw, and a slowly varying factor scales all of
    it, so that no two steps are alike. Residuals grow as a random walk, and steadily where the mean is large.
    """

    def __init__(self, size: int, rank: int, seed: int = 0, layers: int = 50) -> None:
        shared = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
        edges = torch.linspace(0, size, layers + 1).long()
        self.scale = torch.randn(layers, generator=shared).exp().repeat_interleave(edges.diff())
        self.mean = 0.3 * _heavy(size, shared)
        self.noise = _heavy(2 * size, own)
        self.offsets = torch.randint(0, size, (4096,), generator=own).tolist()
        self.buffer = torch.empty(size)

    def at(self, step: int) -> torch.Tensor:
        """Return the gradient of a step, in a buffer that the next call overwrites."""
        offset = self.offsets[step % len(self.offsets)]
        drift = math.exp(0.3 * math.sin(step / 13) + 0.2 * math.sin(step / 5))
        torch.add(self.mean, self.noise[offset : offset + self.mean.numel()], out=self.buffer)
        return self.buffer.mul_(self.scale).mul_(drift)


def _heavy(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()
