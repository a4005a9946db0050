"""Runs an algorithm on ranks as threads, and states the laws on what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import oktopk
from oktopk.algorithms import Algorithm

WORLDS = (1, 2, 3, 4, 5, 7, 8)
EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Outcome:
    """One step on one rank."""

    gradient: Tensor
    before: Tensor
    after: Tensor
    mean: Tensor
    info: oktopk.Info


Steps = list[list[Outcome]]
"""steps[t][r]: what happened in step t on rank r."""


def run(
    world: int,
    gradient: Callable[[int, int], Tensor],
    steps: int,
    algorithm: str | Algorithm,
    density: float,
    **options: str,
) -> Steps:
    """`steps` allreduces of gradient(rank, step), with residuals and state carried along."""

    def rank(comm: oktopk.Communicator) -> list[Outcome]:
        state, outcomes = None, []
        residual = torch.zeros(gradient(comm.rank, 0).numel())
        for step in range(steps):
            g, before = gradient(comm.rank, step), residual.clone()
            mean, info = oktopk.sparse_allreduce(
                g, density, algorithm, residual, comm, state=state, step=step, **options
            )
            state = info.state
            outcomes.append(Outcome(g, before, residual.clone(), mean, info))
        return outcomes

    by_rank = oktopk.run_threads(world, rank, timeout=60)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def assert_agreement(step: Sequence[Outcome]) -> None:
    """Law 1: the result is the same on all ranks, to the bit."""
    for outcome in step:
        assert torch.equal(bits(outcome.mean), bits(step[0].mean))


def assert_conservation(step: Sequence[Outcome]) -> None:
    """Law 2: what stays in the residuals and what went into the mean is what there was, entry by entry."""
    world = len(step)
    there_was = sum(o.gradient.double().flatten() + o.before.double() for o in step)
    there_is = sum(o.after.double() for o in step) + world * step[0].mean.double().flatten()
    magnitude = sum(o.gradient.double().abs().flatten() + o.before.double().abs() for o in step)
    tolerance = 8 * world * EPSILON * magnitude + torch.finfo(torch.float32).tiny
    excess = (there_is - there_was).abs() - tolerance
    assert not (excess > 0).any(), f"mass is lost at {int(excess.argmax())}: {float(excess.max())} too much"


def assert_laws(steps: Steps) -> None:
    for step in steps:
        assert_agreement(step)
        assert_conservation(step)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def heavy_tailed(size: int, seed: int = 0) -> Callable[[int, int], Tensor]:
    """Gradients of log-normal scale that drift, partly the same on all ranks."""

    def gradient(rank: int, step: int) -> Tensor:
        shared = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(seed + 1 + 1000 * rank + step)
        scale = torch.randn(size, generator=shared).exp() * (1.0 + 0.1 * step)
        return scale * (0.3 * torch.randn(size, generator=shared) + torch.randn(size, generator=own))

    return gradient
