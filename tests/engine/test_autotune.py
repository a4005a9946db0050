"""auto=True: whole steps go the way that takes less time, by times that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oktopk
from oktopk.engine import autotune
from oktopk.engine.autotune import RETRIAL, TRIAL, Autotune, Schedule, first_retest
from oktopk.engine.settings import Settings
from tests.support import stepping

Clock = Callable[[int, str], float]
"""clock(step, phase): seconds that a step takes on all ranks."""

TWO = [["c", "d"], ["a", "b"]]
RETEST = 16


@pytest.fixture(autouse=True)
def _early_retests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "FIRST_RETEST", RETEST)
    monkeypatch.setattr(autotune, "RETEST_COST", 1.0)


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    set_clocks(monkeypatch, lambda rank, step, phase: clock(step, phase))


def set_clocks(monkeypatch: pytest.MonkeyPatch, clock: Callable[[int, int, str], float]) -> None:
    """Also by rank: each runs its steps in a worker thread, or in its own, and both have its number."""
    record = Autotune.record

    def faked(tuner: Autotune, step: int, dense: bool, seconds: float) -> None:
        assert seconds > 0
        record(tuner, step, dense, clock(ranks[id(tuner)], step, "dense" if dense else "sparse"))

    ranks: dict[int, int] = {}
    make = oktopk.AllReducer.__init__

    def numbered(reducer: oktopk.AllReducer, *args: Any, **options: Any) -> None:
        make(reducer, *args, **options)
        ranks[id(reducer._engine._steps.autotune)] = reducer._engine.rank

    monkeypatch.setattr(oktopk.AllReducer, "__init__", numbered)
    monkeypatch.setattr(Autotune, "record", faked)


def ways_of(event: oktopk.StepEvent | None) -> str:
    """Of each bucket, as "ds" (dense, sparse)."""
    assert event is not None
    return "".join(part.phase[0] for part in event.reductions)


def run_auto(world: int, steps: int, warmup: int, **options: Any) -> list[tuple[list[str], dict[str, float]]]:
    """By rank: the way of each bucket in each step, and stats() at the end."""

    def job(comm: oktopk.Communicator) -> tuple[list[str], dict[str, float]]:
        ways = []
        with stepping.reducer_on(comm, auto=True, warmup_steps=warmup, **{"buckets": TWO, **options}) as reducer:
            for step in range(steps):
                reducer.sync(stepping.gradients(comm.rank, step))
                ways.append(ways_of(reducer.last))
            return ways, reducer.stats()

    return stepping.on_ranks(world, job)


def agreed(figures: dict[str, float]) -> tuple[float, float, float]:
    return figures["prefers_dense"], figures["dense_step_seconds"], figures["sparse_step_seconds"]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("dense", "sparse", "way"), [(4.0, 1.0, "ss"), (1.0, 3.0, "dd")])
def test_steps_keep_the_faster_way(
    monkeypatch: pytest.MonkeyPatch, world: int, dense: float, sparse: float, way: str
) -> None:
    """Known after the warm-up and eight sparse steps; all buckets go the same way."""
    set_clock(monkeypatch, lambda step, phase: dense if phase == "dense" else sparse)
    for ways, figures in run_auto(world, 5 + TRIAL + 3, warmup=5):
        assert ways == ["dd"] * 5 + ["ss"] * TRIAL + [way] * 3
        assert agreed(figures) == (float(way == "dd"), dense, sparse)


def test_a_tie_goes_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda step, phase: 0.98 if phase == "sparse" else 1.0)
    ((ways, _),) = run_auto(1, 5 + TRIAL + 1, warmup=5)
    assert ways[-1] == "dd"


@pytest.mark.parametrize(("loss", "gain", "way"), [(2.0, 0.8, "dd"), (1.3, 0.2, "ss")])
@pytest.mark.parametrize("slow_rank", [0, 1, 2])
def test_all_ranks_decide_alike_whatever_their_own_clocks_say(
    monkeypatch: pytest.MonkeyPatch, slow_rank: int, loss: float, gain: float, way: str
) -> None:
    """One rank finds sparse slow, the others find it faster; the mean over ranks decides: 1.2, or 1.7 / 3."""

    def clock(rank: int, step: int, phase: str) -> float:
        return 1.0 if phase == "dense" else loss if rank == slow_rank else gain

    set_clocks(monkeypatch, clock)
    by_rank = run_auto(3, 5 + TRIAL + 2, warmup=5)
    for ways, figures in by_rank:
        assert ways[-2:] == [way, way]
        assert figures["sparse_step_seconds"] == pytest.approx((loss + 2 * gain) / 3)
        assert agreed(figures) == agreed(by_rank[0][1])
    assert len({tuple(ways) for ways, _ in by_rank}) == 1


def test_the_first_steps_of_a_trial_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled then: the last five count, by their median."""
    slow = (5, 6, 7, 9, 11)
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else 50.0 if step in slow else 0.5)
    ((ways, figures),) = run_auto(1, 5 + TRIAL + 1, warmup=5)
    assert ways[-1] == "ss"
    assert agreed(figures) == (0.0, 1.0, 0.5)


@pytest.mark.parametrize(("warmup", "missing"), [(0, 4), (1, 3), (3, 1), (4, 0), (9, 0)])
def test_a_short_warm_up_gets_timed_dense_steps(
    monkeypatch: pytest.MonkeyPatch, warmup: int, missing: int
) -> None:
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else 0.5)
    ((ways, figures),) = run_auto(1, warmup + missing + TRIAL + 1, warmup=warmup)
    assert ways == ["dd"] * (warmup + missing) + ["ss"] * (TRIAL + 1)
    assert figures["dense_step_seconds"] == 1.0


def test_trials_wait_for_the_ramp_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else 2.0)
    ((ways, _),) = run_auto(1, 4 + 3 + TRIAL + 1, warmup=4, ramp_steps=3)
    assert ways == ["dd"] * 4 + ["ss"] * (3 + TRIAL) + ["dd"]


@pytest.mark.parametrize(("sparse", "way", "other"), [(0.5, "ss", "dd"), (2.0, "dd", "ss")])
def test_the_other_way_is_tested_again_at_doubling_distance(
    monkeypatch: pytest.MonkeyPatch, sparse: float, way: str, other: str
) -> None:
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else sparse)
    warmup, steps = 4, 4 + 4 * RETEST + 10
    for ways, _ in run_auto(2, steps, warmup):
        tried = {t - warmup for t, found in enumerate(ways) if t >= warmup + TRIAL and found == other}
        assert tried == {start + i for start in (RETEST, 2 * RETEST, 4 * RETEST) for i in range(RETRIAL)}
        assert set(ways[warmup + TRIAL :]) == {way, other}


@pytest.mark.parametrize(("sparse", "way", "other"), [(0.1, "ss", "dd"), (10.0, "dd", "ss")])
def test_a_way_that_is_far_slower_is_tested_again_late(
    monkeypatch: pytest.MonkeyPatch, sparse: float, way: str, other: str
) -> None:
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else sparse)
    late = 64  # re-testing costs 4 · (10 - 1) = 36 steps of the faster way
    assert first_retest(1.0, sparse) == late
    for ways, _ in run_auto(2, 4 + late + RETRIAL, 4):
        assert ways[4 + TRIAL : 4 + late] == [way] * (late - TRIAL)
        assert ways[4 + late :] == [other] * RETRIAL


def test_a_re_test_changes_the_way_when_the_clock_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else (3.0 if step < 14 else 0.5))
    ((ways, figures),) = run_auto(1, 4 + RETEST + RETRIAL + 4, warmup=4)
    assert ways[4 + TRIAL : 4 + RETEST] == ["dd"] * (RETEST - TRIAL)
    assert ways[4 + RETEST :] == ["ss"] * (RETRIAL + 4)
    assert agreed(figures) == (0.0, 1.0, 0.5)


def test_skipped_steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little was done for them, in no time: that says nothing about the sparse way."""
    lost = {8, 9, 10, 11, 12}
    set_clock(monkeypatch, lambda step, phase: 0.0 if step in lost else 1.0 if phase == "dense" else 3.0)

    def job(comm: oktopk.Communicator) -> str:
        with stepping.reducer_on(comm, auto=True, warmup_steps=5, buckets=TWO) as reducer:
            for step in range(5 + TRIAL + 1):
                grads = stepping.gradients(comm.rank, step)
                if step in lost:
                    grads["c"][0, 0] = float("inf")
                reducer.sync(grads)
            return ways_of(reducer.last)

    assert stepping.on_ranks(2, job) == ["dd", "dd"]


def test_steps_of_excluded_parameters_only_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dense whatever is decided, so that there is nothing to compare."""
    set_clock(monkeypatch, lambda step, phase: 1.0)
    ((ways, figures),) = run_auto(1, 5 + TRIAL + 1, warmup=5, dense=["*"])
    assert set(ways) == {"dd"}
    assert agreed(figures) == (0.0, 0.0, 0.0)


def resume(
    comm: oktopk.Communicator, first: int, then: range, **options: Any
) -> tuple[list[str], dict[str, float]]:
    """The ways of the steps after a checkpoint, and stats() at the end."""
    with stepping.reducer_on(comm, auto=True, warmup_steps=4, **options) as reducer:
        stepping.record_steps(reducer, comm.rank, range(first))
        state = stepping.through_a_file(reducer.state_dict())
    with stepping.reducer_on(comm, auto=True, warmup_steps=4, **options) as resumed:
        resumed.load_state_dict(state)
        phases = [record.event.phase for record in stepping.record_steps(resumed, comm.rank, then)]
        return phases, resumed.stats()


@pytest.mark.parametrize(("sparse", "phase"), [(9.0, "dense"), (0.5, "sparse")])
def test_the_decision_survives_a_checkpoint(monkeypatch: pytest.MonkeyPatch, sparse: float, phase: str) -> None:
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else sparse)
    for phases, figures in stepping.on_ranks(2, lambda comm: resume(comm, 13, range(13, 14), buckets=TWO)):
        assert phases == [phase]
        assert agreed(figures) == (float(phase == "dense"), 1.0, sparse)


def test_a_run_resumed_just_before_a_re_test_knows_what_was_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no dense step of its own to compare with."""
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else 4.0)
    ((phases, _),) = stepping.on_ranks(1, lambda comm: resume(comm, 4 + RETEST, range(5)))
    assert phases == ["sparse"] * RETRIAL + ["dense"]


def test_a_run_resumed_before_its_first_decision_knows_dense_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up was before the checkpoint, all sparse steps come after it."""
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else 9.0)
    for phases, _ in stepping.on_ranks(3, lambda comm: resume(comm, 4, range(4, TRIAL + 5))):
        assert phases == ["sparse"] * TRIAL + ["dense"]


def test_momentum_correction_and_a_changing_way_keep_replicas_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    """Velocities are a rank's own by the time steps turn dense; the result is the same on all ranks."""
    set_clock(monkeypatch, lambda step, phase: 1.0 if phase == "dense" else 2.0)
    steps = stepping.run_steps(2, 16, auto=True, warmup_steps=4, momentum=0.5)
    assert {step[0].event.phase for step in steps[4:12]} == {"sparse"}
    assert {step[0].event.phase for step in steps[12:]} == {"dense"}
    for step in steps:
        assert stepping.same_bits(step[0].result, step[1].result)


def test_dense_stays_dense_and_is_not_compared() -> None:
    ((ways, figures),) = run_auto(1, 14, warmup=1, algorithm="dense")
    assert set(ways) == {"dd"}
    assert agreed(figures) == (0.0, 0.0, 0.0)


def test_without_auto_nothing_is_timed() -> None:
    with stepping.reducer_on(None, warmup_steps=1) as reducer:
        stepping.record_steps(reducer, 0, range(3))
        assert reducer.state_dict()["autotune"] == {
            "prefers_dense": False,
            "retest": RETEST,
            "seconds": [0.0, 0.0],
        }
        assert "prefers_dense" not in reducer.stats()


# The rule itself: a pure function of the step and of what was agreed.


@given(
    steps=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    warmup=st.integers(0, 200),
    ramp=st.integers(0, 20),
    auto=st.booleans(),
    prefers_dense=st.booleans(),
    seconds=st.tuples(st.floats(0, 10), st.floats(0, 10)),
    retest=st.integers(4, 16).map(lambda power: 2**power),
)
def test_asking_for_a_density_changes_nothing(
    steps: list[int],
    warmup: int,
    ramp: int,
    auto: bool,
    prefers_dense: bool,
    seconds: tuple[float, float],
    retest: int,
) -> None:
    """In any order and any number of times: the answer is the same, and so is the state."""
    settings = Settings(oktopk.ALGORITHMS["oktopk"](), 0.01, warmup, ramp, auto=auto)
    state = {"prefers_dense": prefers_dense, "retest": retest, "seconds": list(seconds)}
    asked, fresh = Autotune(settings), Autotune(settings)
    asked.load_state_dict(state)
    fresh.load_state_dict(state)
    answers = [asked.density(step) for step in steps]
    assert [asked.density(step) for step in reversed(steps)] == answers[::-1]
    assert [fresh.density(step) for step in sorted(steps)] == [
        answer for _, answer in sorted(zip(steps, answers, strict=True), key=lambda pair: pair[0])
    ]
    assert asked.state_dict() == fresh.state_dict() == state
    for step, answer in zip(steps, answers, strict=True):
        assert answer in (None, Schedule(settings.density, warmup, ramp).density_at(step))
        if step < warmup:
            assert answer is None
        elif not auto or step < warmup + ramp:
            assert answer is not None


times = st.lists(st.floats(1e-6, 1e3), min_size=2 * TRIAL + RETEST, max_size=2 * TRIAL + RETEST)


@given(clocks=st.lists(times, min_size=2, max_size=3), warmup=st.integers(0, 6))
def test_all_ranks_agree_on_every_density(clocks: list[list[float]], warmup: int) -> None:
    """Whatever each of them has measured, and also those who only hear of a decision."""
    settings = Settings(oktopk.ALGORITHMS["oktopk"](), 0.01, warmup, auto=True)

    def job(comm: oktopk.Communicator) -> list[float | None]:
        tuner, found = Autotune(settings), []
        for step, seconds in enumerate(clocks[comm.rank]):
            density = tuner.density(step)
            found.append(density)
            tuner.record(step, density is None, seconds)
            assert tuner.density(step) == density
            if tuner.decides_after(step):
                tuner.decide(comm, step)
                assert tuner.decides_after(step)  # those who only hear of the decision ask when it has come
                assert tuner.is_trial(step)
            told = Autotune(settings)
            told.load_state_dict(tuner.state_dict())
            assert told.density(step + 1) == tuner.density(step + 1)
        return found

    by_rank = stepping.on_ranks(len(clocks), job)
    assert all(found == by_rank[0] for found in by_rank)
