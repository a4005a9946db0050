"""Runs an algorithm on ranks that are threads, and states the laws on what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Algorithm
from ..collective import Info, sparse_allreduce
from ..comm import Communicator, run_threads
from .gradients import Gradient

WORLDS = (1, 2, 3, 4, 5, 7, 8)
"""Numbers of ranks."""
_EPSILON, _TINY = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Outcome:
    """One step on one rank: its gradient, its residual before and after, the mean, and what was done."""

    gradient: Tensor
    before: Tensor
    after: Tensor
    mean: Tensor
    info: Info


Steps = list[list[Outcome]]
"""steps[t][r]: what happened in step t on rank r."""


def assert_agreement(step: Sequence[Outcome]) -> None:
    """Law 1: the result is the same on all ranks, to the bit."""
    for rank, outcome in enumerate(step):
        if not torch.equal(bits(outcome.mean), bits(step[0].mean)):
            raise AssertionError(f"law 1 (agreement): ranks 0 and {rank} have different results")


def assert_conservation(step: Sequence[Outcome]) -> None:
    """Law 2: what stays in the residuals and what went into the mean is what there was, entry by entry."""
    world = len(step)
    gradients = torch.stack([o.gradient.double().flatten() for o in step])
    before, after = (torch.stack([getattr(o, name).double() for o in step]) for name in ("before", "after"))
    there_was = gradients.sum(0) + before.sum(0)
    there_is = after.sum(0) + world * step[0].mean.double().flatten()
    magnitude = gradients.abs().sum(0) + before.abs().sum(0)
    excess = (there_is - there_was).abs() - (8 * world * _EPSILON * magnitude + _TINY)
    if not (excess <= 0).all():
        place = int(excess.nan_to_num(nan=torch.inf).argmax())
        raise AssertionError(
            f"law 2 (conservation): at entry {place} residuals + P · mean is {float(there_is[place])}, "
            f"gradients + residuals were {float(there_was[place])}"
        )


def assert_laws(steps: Steps) -> None:
    """Laws 1 and 2 on every step; and none is skipped."""
    for step in steps:
        if any(outcome.info.skipped for outcome in step):
            raise AssertionError("law 5: a step was skipped, although all gradients are finite")
        assert_agreement(step)
        assert_conservation(step)


def run(
    world: int, gradient: Gradient, steps: int, algorithm: str | Algorithm, density: float, **options: Any
) -> Steps:
    """`steps` all-reduces of gradient(rank, step), with residuals and state carried along."""

    def rank(comm: Communicator) -> list[Outcome]:
        residual = torch.zeros(gradient(comm.rank, 0).numel())
        return follow(comm, gradient, range(steps), algorithm, density, residual, None, **options)

    by_rank = run_threads(world, rank)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def follow(
    comm: Communicator, gradient: Gradient, steps: Iterable[int], algorithm: str | Algorithm, density: float,
    residual: Tensor, state: Any, **options: Any,
) -> list[Outcome]:  # fmt: skip
    """Some steps of one rank, from a residual, which is updated, and a state."""
    outcomes = []
    for step in steps:
        given, before = gradient(comm.rank, step), residual.clone()
        mean, info = sparse_allreduce(given, density, algorithm, residual, comm, state=state, step=step, **options)
        state = info.state
        outcomes.append(Outcome(given, before, residual.clone(), mean, info))
    return outcomes


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)
