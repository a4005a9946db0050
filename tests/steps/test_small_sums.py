"""Sums of small models: every way gives all ranks the same sum, and the fastest is taken."""

from __future__ import annotations

import itertools

import pytest
import stepping
import torch
from posting import Poster
from torch import Tensor

import oktopk
from oktopk.engine import small_sums
from oktopk.engine.small_sums import Race, SmallSums
from oktopk.metrics.traffic import Operation

OPERATION = Operation("all_reduce", "dense")
RING, TWO, ONE = range(3)


def own(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_every_way_gives_the_same_sum_on_all_ranks(world: int, size: int, dtype: torch.dtype) -> None:
    """To the bit among ranks, and to rounding the true one: the last parts may be of zeros that fill them up."""

    def job(comm: oktopk.Communicator) -> list[Tensor]:
        sums, found = SmallSums(comm, Poster(comm), OPERATION), []
        for sum_ in sums._ways[1:]:  # the first one is the library's
            x = own(comm.rank, size, dtype)
            sum_(x)
            found.append(x)
        return found

    true = torch.stack([own(rank, size, dtype) for rank in range(world)]).double().sum(0)
    first, *others = stepping.on_ranks(world, job)
    for sums in (first, *others):
        for x, agreed in zip(sums, first, strict=True):
            assert torch.equal(x, agreed)
            torch.testing.assert_close(x, true.to(dtype), atol=world * torch.finfo(dtype).eps * 4, rtol=0)


def test_what_is_not_finite_reaches_all_ranks_at_its_place() -> None:
    def job(comm: oktopk.Communicator) -> None:
        for sum_ in SmallSums(comm, Poster(comm), OPERATION)._ways:
            x = torch.ones(10)
            if comm.rank == 1:
                x[0] = float("nan")
            sum_(x)
            assert x.isnan().tolist() == [True] + [False] * 9

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("fastest", [RING, TWO, ONE])
def test_all_ranks_take_the_way_that_is_the_fastest_for_all_of_them(fastest: int) -> None:
    """Rank 0 would choose another one."""

    def job(comm: oktopk.Communicator) -> list[int]:
        race, ways = Race(3), []
        for _ in range(20):
            ways.append(race.way)
            slow = 1.0 if race.way != fastest else 0.5
            race.note(0.1 if comm.rank == 0 and race.way != fastest else slow, comm)
        return ways

    trials = [0, 1, 2] * small_sums._TRIES
    assert stepping.on_ranks(5, job) == 5 * [trials + [fastest] * (20 - len(trials))]


def test_one_sum_that_was_disturbed_changes_nothing() -> None:
    def job(comm: oktopk.Communicator) -> int:
        race = Race(3)
        for turn, way in itertools.product(range(small_sums._TRIES), range(3)):
            race.note(60.0 if (turn, way) == (1, ONE) else (3.0, 2.0, 1.0)[way], comm)
        return race.way

    assert stepping.on_ranks(2, job) == [ONE, ONE]


def test_ways_are_tried_again_at_growing_distances_and_old_times_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(small_sums, "_REST", 10)

    def job(comm: oktopk.Communicator) -> str:
        race, ways = Race(3), ""
        for number in range(90):
            ways += str(race.way)
            now = (9.0, 1.0, 5.0) if number < 20 else (9.0, 5.0, 1.0)
            race.note(now[race.way], comm)
        return ways

    trials = "012" * small_sums._TRIES
    told = trials + 10 * "1" + trials + 20 * "2" + trials + 40 * "2"
    assert stepping.on_ranks(3, job) == 3 * [told[:90]]


def test_it_is_told_what_each_way_moves() -> None:
    """Bytes and messages per rank, of 10 entries over 4 ranks: parts are filled up to 3 entries."""

    def job(comm: oktopk.Communicator) -> list[tuple[int, int]]:
        sums = SmallSums(comm, Poster(comm), OPERATION)
        return [sums.sum_(torch.ones(10)) for _ in range(4)]

    assert stepping.on_ranks(4, job) == 4 * [[(60, 6), (72, 6), (120, 3), (60, 6)]]


def test_nobody_sends_too_much_to_be_done_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_sums, "_ONE_ROUND_BYTES", 119)

    def job(comm: oktopk.Communicator) -> list[tuple[int, int]]:
        sums = SmallSums(comm, Poster(comm), OPERATION)
        return [sums._one_round(torch.ones(size)) for size in (9, 10)]

    assert stepping.on_ranks(4, job) == 4 * [[(108, 3), (72, 6)]]
