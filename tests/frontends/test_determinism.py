"""Same seed, same bits: run after run on one transport, and in sparse steps across threads, gloo and MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk import ALGORITHMS, AllReducer, Communicator, run_threads
from oktopk.wire.message import VALUE_CODES
from tests.support import worlds
from tests.support.training import Run, same_bits, with_hook

SIZES = {"a": 701, "b": 1, "c": 402, "d": 397}
BUCKETS = [["a", "b"], ["c"], ["d"]]
N = sum(SIZES.values())
WARMUP, STEPS, DENSITY = 1, 3, 0.05
JOINS = (0, 10**6)
"""Each bucket by itself, and all buckets in the same messages."""
Case = tuple[str, str, int]
"""An algorithm, a value code, and `join`."""
CASES: list[Case] = [
    (algorithm, values, JOINS[(a + v) % 2])
    for (a, algorithm), (v, values) in product(enumerate(ALGORITHMS), enumerate(VALUE_CODES))
]
"""Every two of them meet."""


@dataclass(frozen=True)
class Outcome:
    """What one rank has after the steps of one case."""

    means: Tensor
    """One row for each step."""
    residual: Tensor


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    """Heavy-tailed, partly the same on all ranks."""
    own, common = (torch.Generator().manual_seed(1000 * step + r) for r in (rank, 999))
    scale = torch.randn(N, generator=common).mul(1.5).exp()
    flat = scale * (torch.randn(N, generator=common) + torch.randn(N, generator=own))
    return dict(zip(SIZES, flat.split(list(SIZES.values())), strict=True))


def follow(comm: Communicator, case: Case, dawdle: bool) -> Outcome:
    algorithm, values, fusion_entries = case
    parameters = {name: torch.zeros(size, requires_grad=True) for name, size in SIZES.items()}
    means = []
    with AllReducer(
        parameters.items(), algorithm, DENSITY, comm, warmup_steps=WARMUP, buckets=BUCKETS, auto=False,
        values=values, fusion_entries=fusion_entries,
    ) as reducer:  # fmt: skip
        for step in range(STEPS):
            if dawdle:  # another rank comes last in each step
                time.sleep(0.001 * ((comm.rank + step) % comm.world))
            means.append(torch.cat(list(reducer.sync(gradient(comm.rank, step)).values())))
        assert (reducer.last.phase == "dense") == (algorithm == "dense")
        kept = reducer.state_dict()["residuals"]
    residual = torch.cat([kept.get(name, torch.zeros(size)) for name, size in SIZES.items()])
    return Outcome(torch.stack(means), residual)


Outcomes = dict[Case, Outcome]
Ranks = list[Outcomes]


def job(connect: Callable[..., Communicator], dawdles: tuple[bool, ...]) -> list[Outcomes]:
    """A run for each of them, in the same processes."""
    torch.set_num_threads(1)
    comm = connect(timeout=100.0)
    return [{case: follow(comm, case, dawdle) for case in CASES} for dawdle in dawdles]


def launch(transport: str, world: int, *dawdles: bool) -> list[Ranks]:
    """By run, then by rank."""
    if transport == "threads":
        ranks = run_threads(world, lambda comm: job(lambda timeout: comm, dawdles))
    else:
        ranks = worlds.run(transport, world, job, dawdles, timeout=140)
    return [list(run) for run in zip(*ranks, strict=True)]


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def assert_means(ranks: Ranks, case: Case, steps: range) -> None:
    """Dense steps give the mean of the gradients, but for rounding."""
    for step in steps:
        parts = torch.stack([torch.cat(list(gradient(rank, step).values())) for rank in range(len(ranks))])
        exact = parts.double().mean(0)
        allowed = torch.finfo(torch.float32).eps * parts.double().abs().sum(0)
        assert bool(((ranks[0][case].means[step] - exact).abs() <= allowed).all()), (case, step)


def assert_same_bits(one: Ranks, other: Ranks) -> None:
    """Dense steps too."""
    for mine, again in zip(one, other, strict=True):
        for case in CASES:
            assert equal(mine[case].means, again[case].means), case
            assert equal(mine[case].residual, again[case].residual), case


def assert_bits_of_threads(real: Ranks, simulated: Ranks) -> None:
    """All that sparse steps do, on all ranks; dense ones may round differently, and leave nothing behind."""
    for case in CASES:
        first_sparse = STEPS if case[0] == "dense" else WARMUP
        for one, other in zip(real, simulated, strict=True):
            assert equal(one[case].means[first_sparse:], other[case].means[first_sparse:]), case
            assert equal(one[case].residual, other[case].residual), case
            assert equal(one[case].means, real[0][case].means), case
            assert equal(other[case].means, simulated[0][case].means), case
        assert_means(real, case, range(first_sparse))
        assert_means(simulated, case, range(first_sparse))


WORLDS = {
    ("gloo", 3): [(False,), (True,)],
    ("gloo", 5): [(False,)],
    ("mpi", 3): [(False, True)],
    ("threads", 3): [(False, True)],
}
"""One start of the processes after the other, with the runs that they do."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "world"), WORLDS)
def test_all_have_the_bits_of_threads_and_of_the_run_before(transport: str, world: int) -> None:
    """In old processes and new ones, and whoever comes last."""
    first, *others = [run for dawdles in WORLDS[transport, world] for run in launch(transport, world, *dawdles)]
    for other in others:
        assert_same_bits(first, other)
    (simulated,) = launch("threads", world, False)
    assert_bits_of_threads(first, simulated)


def train_twice(connect: Callable[..., Any]) -> list[Run]:
    options = {"density": 0.05, "warmup_steps": 5, "auto": False, "values": "fp16", "timeout": 100.0}
    return [with_hook(None, 15, fusion_entries=fusion_entries, **options) for fusion_entries in JOINS]


@pytest.mark.timeout(300)
def test_training_by_the_hook_has_the_same_bits_run_after_run() -> None:
    first, second = (worlds.run("gloo", 3, train_twice, timeout=140) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.sparse_steps == 10
            assert same_bits(a.parameters, b.parameters)
            assert a.layouts == b.layouts
    assert not same_bits(first[0][0].parameters, first[0][1].parameters)  # each join has its own k
