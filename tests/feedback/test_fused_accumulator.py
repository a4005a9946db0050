"""Fused accumulators do what one over all of their entries does, to the bit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from oktopk import AllReducer, run_threads
from oktopk.feedback.accumulator import Accumulator
from oktopk.kernels import Picked
from oktopk.wire.sparse_vector import SparseVector

SIZES = [[7], [40, 33], [1, 0, 100], [64, 5, 31, 300]]


def heavy(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()
    return (8 * x).round() / 8  # with ties


def pair(sizes: list[int], seed: int = 0) -> tuple[Accumulator, Accumulator]:
    grad, residual = heavy(sum(sizes), seed), heavy(sum(sizes), seed + 1)
    several = Accumulator(grad.clone().split(sizes), residual.clone().split(sizes))
    return Accumulator([grad], [residual]), several


def told(picked: Picked) -> tuple[object, ...]:
    return picked.indices.tolist(), picked.values.tolist(), picked.count, picked.above, picked.finite


def work(fused: Accumulator) -> torch.Tensor:
    return torch.cat(list(fused.works))


def residual(fused: Accumulator) -> torch.Tensor:
    return torch.cat(list(fused.pieces()))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("capacity", [0, 3, 10, 1000])
def test_select(sizes: list[int], capacity: int):
    one, several = pair(sizes)
    for threshold in (0.5, 2.0, 0.25):  # the first call adds the gradient
        assert told(one.select(threshold, capacity)) == told(several.select(threshold, capacity))
    assert torch.equal(one.values, residual(several))
    assert torch.equal(one.works[0], work(several))


@pytest.mark.parametrize("sizes", SIZES)
def test_questions_of_a_selection(sizes: list[int]):
    one, several = pair(sizes, 3)
    total = sum(sizes)
    for k in {1, total // 10 + 1, total // 2 + 1, total}:
        assert one.kth_magnitude(k) == several.kth_magnitude(k)
    magnitude = float(one.values.abs().median())
    for limit in (0, 1, 5, total):
        assert one.first_equal(magnitude, limit).tolist() == several.first_equal(magnitude, limit).tolist()
    indices = torch.arange(0, total, 3, dtype=torch.int32)
    assert torch.equal(one.at(indices), several.at(indices))
    assert one.moments() == pytest.approx(several.moments(), rel=1e-12)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_the_end_of_a_step(sizes: list[int], parts: int):
    total = sum(sizes)
    one, several = pair(sizes, 5)
    vectors = []
    for seed in range(parts):
        indices = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: total // 2].sort().values
        vectors.append(SparseVector(indices.to(torch.int32), heavy(len(indices), seed), total))
    results = []
    for acc in (one, several):
        acc.select(1.0, total)
        acc.release(vectors)
        results.append(acc.write_mean(vectors, 3))
    assert results[0] == results[1] == int(one.works[0].count_nonzero())
    assert torch.equal(one.values, residual(several))
    assert torch.equal(one.works[0], work(several))


def test_a_step_is_taken_back():
    one, several = pair([40, 33])
    before = one.residuals[0].clone()
    several.select(1.0, 5)
    several.rollback()
    assert torch.equal(residual(several), before)
    assert not work(several).any()


PARAMETERS = {"a": 300, "b": 71, "c": 1200}
WHOLE, APART = "model", [["a"], ["b"], ["c"]]
LOST = 3
"""The step in which one rank has a number that is not finite."""


def reducer_on(comm, plan, **options):
    named = [(name, torch.nn.Parameter(torch.zeros(size))) for name, size in PARAMETERS.items()]
    defaults = {"density": 0.05, "warmup_steps": 0, "auto": False}
    return AllReducer(named, comm=comm, buckets=plan, **(defaults | options))


def synced(reducer, rank: int, steps: Iterable[int]) -> list[object]:
    found = []
    for step in steps:
        grads = {name: heavy(size, 97 * step + rank) for name, size in PARAMETERS.items()}
        if step == LOST and rank == 0:
            grads["b"][7] = torch.nan
        sums = {name: grad.tolist() for name, grad in reducer.sync(grads).items()}
        found.append((sums, reducer.last.skipped, reducer.last.culprits, len(reducer.last.reductions)))
    return found


def held(reducer) -> object:
    saved = reducer.state_dict()
    return {name: part.tolist() for name, part in saved["residuals"].items()}


@pytest.mark.parametrize("algorithm", ["oktopk", "topka", "topkdsa", "gtopk", "gaussiank"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"values": "e4m3"}], ids=["plain", "momentum", "e4m3"])
def test_small_buckets_give_what_one_bucket_gives(algorithm: str, world: int, options: dict[str, object]):
    """They share messages, k and thresholds, so that it does not matter how parameters lie in buckets.

    A step that is lost is lost for all of them, and their residuals are as before.
    """

    def train(comm, plan):
        with reducer_on(comm, plan, algorithm=algorithm, **options) as reducer:
            found = synced(reducer, comm.rank, range(6))
            return found, held(reducer), reducer.last.wire.sent_messages

    whole = run_threads(world, lambda comm: train(comm, WHOLE))
    assert whole == run_threads(world, lambda comm: train(comm, APART))
    assert [step[1] for step in whole[0][0]] == [step == LOST for step in range(6)]


@pytest.mark.parametrize("plan", [WHOLE, APART], ids=["one bucket", "three"])
def test_fused_buckets_resume_to_the_bit(plan):
    def through(comm):
        with reducer_on(comm, plan) as reducer:
            return synced(reducer, comm.rank, range(8))

    def in_two(comm):
        with reducer_on(comm, plan) as first:
            before = synced(first, comm.rank, range(5))
            saved = first.state_dict()
        with reducer_on(comm, plan) as second:
            second.load_state_dict(saved)
            return before + synced(second, comm.rank, range(5, 8))

    assert run_threads(3, through) == run_threads(3, in_two)


def test_a_mean_goes_to_all_members_and_a_copy_is_there_for_who_asks():
    one, several = pair([40, 33])
    assert torch.equal(one.values, several.values)
    mean = heavy(73, 9)
    for acc in (one, several):
        acc.write_dense_mean(mean)
    assert torch.equal(one.works[0], work(several))
    assert torch.equal(one.residuals[0], residual(several))


def test_next_to_nothing_is_not_looked_at_again():
    grad = torch.zeros(100)
    grad[::9] = 1.0
    several = Accumulator(grad.clone().split([60, 40]), torch.zeros(100).split([60, 40]))
    assert several.kth_magnitude(12) == 1.0
    assert several.kth_magnitude(50) == 0.0


def test_a_waiting_bucket_is_left_alone_when_another_loses_the_step():
    """A dense bucket that is not finite comes after a sparse one: neither is applied, and it is named."""
    sizes = {"sparse": 300, "dense": 20}

    def train(comm):
        with AllReducer(
            [(name, torch.nn.Parameter(torch.zeros(size))) for name, size in sizes.items()],
            density=0.05, warmup_steps=0, comm=comm, buckets=[["sparse"], ["dense"]], auto=False,
            fusion_entries=10_000, dense=["dense"],
        ) as reducer:  # fmt: skip
            grads = {name: heavy(size, comm.rank) for name, size in sizes.items()}
            grads["dense"][3] = torch.nan if comm.rank == 1 else 0.0
            found = reducer.sync(grads)
            return reducer.last.skipped, reducer.last.culprits, [bool(grad.any()) for grad in found.values()]

    assert run_threads(3, train) == [(True, ("rank 1: dense",), [False, False])] * 3
