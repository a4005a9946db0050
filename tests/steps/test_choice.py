"""auto=True: each bucket keeps the way that the clock prefers, by clocks that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import stepping

import oktopk
from oktopk.engine import bucket_reducer as lanes
from oktopk.engine import choice
from oktopk.engine.recorder import ReductionRecorder
from oktopk.engine.ways import Ways
from oktopk.metrics.events import ReductionEvent

Clock = Callable[[int, int, int, str], float]
"""clock(rank, step, bucket, phase): seconds that a reduction takes."""

TWO = [["c", "d"], ["a", "b"]]
RETEST = 16


@pytest.fixture(autouse=True)
def _early_retests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FIRST_RETEST", RETEST)


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    class Faked(ReductionRecorder):
        def close(self, phase: str, *args: Any, **facts: Any) -> ReductionEvent:
            event = super().close(phase, *args, **facts)
            return replace(event, start=0.0, stop=clock(self.meter.rank, self.step, self.bucket, phase))

    monkeypatch.setattr(lanes, "ReductionRecorder", Faked)
    set_steps(monkeypatch, lambda parts: sum(part.stop - part.start for part in parts))


def set_steps(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Sequence[ReductionEvent]], float]) -> None:
    """How long a step takes that has these reductions."""
    monkeypatch.setattr(Ways, "seconds", staticmethod(lambda reductions, start: seconds(reductions)))


def run_auto(world: int, steps: int, warmup: int, **options: Any) -> list[tuple[list[str], dict[str, float]]]:
    """By rank: the way of each bucket in each step, as "ds" (dense, sparse), and stats() at the end."""

    def job(comm: oktopk.Communicator) -> tuple[list[str], dict[str, float]]:
        ways = []
        with stepping.reducer_on(comm, auto=True, warmup_steps=warmup, buckets=TWO, **options) as reducer:
            for step in range(steps):
                reducer.sync(stepping.gradients(comm.rank, step))
                assert reducer.last is not None
                ways.append("".join(part.phase[0] for part in reducer.last.reductions))
            return ways, reducer.stats()

    return stepping.on_ranks(world, job)


@pytest.mark.parametrize("world", [1, 3])
def test_each_bucket_keeps_its_faster_way(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Bucket 0 is faster sparse, bucket 1 dense: known after the warm-up and eight sparse steps."""
    seconds = {(0, "dense"): 4.0, (0, "sparse"): 1.0, (1, "dense"): 1.0, (1, "sparse"): 3.0}
    set_clock(monkeypatch, lambda rank, step, bucket, phase: seconds[bucket, phase])
    for ways, figures in run_auto(world, 5 + choice.TRIAL + 3, warmup=5):
        assert ways == ["dd"] * 5 + ["ss"] * choice.TRIAL + ["sd"] * 3
        numbers = {name: value for name, value in figures.items() if name.startswith("bucket")}
        assert numbers == {
            "bucket0/goes_dense": 0.0,
            "bucket0/dense_seconds": 4.0,
            "bucket0/sparse_seconds": 1.0,
            "bucket1/goes_dense": 1.0,
            "bucket1/dense_seconds": 1.0,
            "bucket1/sparse_seconds": 3.0,
        }


def test_a_tie_goes_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 0.98 if bucket == 0 and phase == "sparse" else 1.0)
    ((ways, _),) = run_auto(1, 5 + choice.TRIAL + 1, warmup=5)
    assert ways[-1] == "dd"


@pytest.mark.parametrize("world", [1, 3])
def test_whole_steps_count_more_than_their_reductions(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Each reduction is faster sparse, but the dense ones were hidden behind backward: steps are faster dense."""
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 3.0 if phase == "dense" else 1.0)
    set_steps(monkeypatch, lambda parts: 1.0 if parts[0].phase == "dense" else 2.0)
    for ways, figures in run_auto(world, 5 + choice.TRIAL + 2, warmup=5):
        assert ways[-2:] == ["dd", "dd"]
        assert (figures["dense_step_seconds"], figures["sparse_step_seconds"]) == (1.0, 2.0)


def test_sparse_steps_that_pay_stay_whatever_single_reductions_say(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 1.0 if phase == "dense" else 3.0)
    set_steps(monkeypatch, lambda parts: 2.0 if parts[0].phase == "dense" else 1.0)
    ((ways, _),) = run_auto(1, 5 + choice.TRIAL + 2, warmup=5)
    assert ways[-2:] == ["ss", "ss"]


@pytest.mark.parametrize("slow_rank", [0, 1, 2])
def test_all_ranks_decide_alike_whatever_their_own_clocks_say(
    monkeypatch: pytest.MonkeyPatch, slow_rank: int
) -> None:
    """One rank finds sparse slow, the others find it faster; the mean over ranks decides."""

    def clock(rank: int, step: int, bucket: int, phase: str) -> float:
        if phase == "dense":
            return 1.0
        loss, gain = (2.0, 0.8) if bucket == 0 else (1.3, 0.2)  # the mean is 1.2, and 1.7 / 3
        return loss if rank == slow_rank else gain

    set_clock(monkeypatch, clock)
    by_rank = run_auto(3, 5 + choice.TRIAL + 2, warmup=5)
    for ways, figures in by_rank:
        assert ways[-2:] == ["ds", "ds"]
        assert figures["bucket0/sparse_seconds"] == pytest.approx(1.2)
        assert figures["bucket1/sparse_seconds"] == pytest.approx(1.7 / 3)
    assert len({tuple(ways) for ways, _ in by_rank}) == 1


def test_the_first_steps_of_a_trial_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled then: the last five count, by their median."""
    slow = (5, 6, 7, 9, 11)

    def clock(rank: int, step: int, bucket: int, phase: str) -> float:
        return 1.0 if phase == "dense" else 50.0 if step in slow else 0.5

    set_clock(monkeypatch, clock)
    ((ways, figures),) = run_auto(1, 5 + choice.TRIAL + 1, warmup=5)
    assert ways[-1] == "ss"
    assert figures["bucket0/sparse_seconds"] == 0.5


@pytest.mark.parametrize(("warmup", "missing"), [(0, 4), (1, 3), (3, 1), (4, 0), (9, 0)])
def test_a_short_warm_up_gets_timed_dense_steps(
    monkeypatch: pytest.MonkeyPatch, warmup: int, missing: int
) -> None:
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 1.0 if phase == "dense" else 0.5)
    ((ways, figures),) = run_auto(1, warmup + missing + choice.TRIAL + 1, warmup=warmup)
    assert ways == ["dd"] * (warmup + missing) + ["ss"] * (choice.TRIAL + 1)
    assert figures["bucket1/dense_seconds"] == 1.0


def test_trials_wait_for_the_ramp_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 1.0 if phase == "dense" else 2.0)
    ((ways, _),) = run_auto(1, 4 + 3 + choice.TRIAL + 1, warmup=4, ramp_steps=3)
    assert ways == ["dd"] * 4 + ["ss"] * (3 + choice.TRIAL) + ["dd"]


def test_the_other_way_is_tested_again_at_doubling_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket 0 stays sparse, bucket 1 stays dense, but both are tried the other way now and then."""
    seconds = {(0, "dense"): 4.0, (0, "sparse"): 1.0, (1, "dense"): 1.0, (1, "sparse"): 2.0}
    set_clock(monkeypatch, lambda rank, step, bucket, phase: seconds[bucket, phase])
    warmup, steps = 4, 4 + 4 * RETEST + 10
    for ways, _ in run_auto(2, steps, warmup):
        tried = {t - warmup for t, way in enumerate(ways) if t >= warmup + choice.TRIAL and way == "ds"}
        assert tried == {start + i for start in (RETEST, 2 * RETEST, 4 * RETEST) for i in range(choice.RETRIAL)}
        assert set(ways[warmup + choice.TRIAL :]) == {"sd", "ds"}


def test_a_re_test_changes_the_way_when_the_clock_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(rank: int, step: int, bucket: int, phase: str) -> float:
        return 1.0 if phase == "dense" else (3.0 if step < 14 else 0.5)

    set_clock(monkeypatch, clock)
    ((ways, figures),) = run_auto(1, 4 + RETEST + choice.RETRIAL + 4, warmup=4)
    trial = 4 + choice.TRIAL
    assert ways[trial : 4 + RETEST] == ["dd"] * (RETEST - choice.TRIAL)
    assert ways[4 + RETEST :] == ["ss"] * (choice.RETRIAL + 4)
    assert (figures["bucket0/dense_seconds"], figures["bucket0/sparse_seconds"]) == (1.0, 0.5)


def test_buckets_that_a_lost_step_left_out_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was done for them, in no time: that says nothing about the sparse way."""
    lost = {8, 9, 10, 11, 12}

    def clock(rank: int, step: int, bucket: int, phase: str) -> float:
        return 0.0 if step in lost else 1.0 if phase == "dense" else 3.0

    set_clock(monkeypatch, clock)

    def job(comm: oktopk.Communicator) -> str:
        with stepping.reducer_on(comm, auto=True, warmup_steps=5, buckets=TWO) as reducer:
            for step in range(5 + choice.TRIAL + 1):
                grads = stepping.gradients(comm.rank, step)
                if step in lost:
                    grads["c"][0, 0] = float("inf")
                reducer.sync(grads)
            assert reducer.last is not None
            return "".join(part.phase[0] for part in reducer.last.reductions)

    assert stepping.on_ranks(2, job) == ["dd", "dd"]


def test_the_decision_survives_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {(0, "dense"): 1.0, (0, "sparse"): 9.0, (1, "dense"): 19.0, (1, "sparse"): 1.0}
    set_clock(monkeypatch, lambda rank, step, bucket, phase: seconds[bucket, phase])

    def job(comm: oktopk.Communicator) -> tuple[str, dict[str, float]]:
        with stepping.reducer_on(comm, auto=True, warmup_steps=4, buckets=TWO) as reducer:
            stepping.record_steps(reducer, comm.rank, range(13))
            state = reducer.state_dict()
        with stepping.reducer_on(comm, auto=True, warmup_steps=4, buckets=TWO) as resumed:
            resumed.load_state_dict(state)
            (record,) = stepping.record_steps(resumed, comm.rank, [13])
            return "".join(part.phase[0] for part in record.event.reductions), resumed.stats()

    for ways, figures in stepping.on_ranks(2, job):
        assert ways == "ds"
        assert (figures["bucket0/dense_seconds"], figures["bucket0/sparse_seconds"]) == (1.0, 9.0)


def test_a_run_resumed_just_before_a_re_test_knows_what_was_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no dense step of its own to compare with."""
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 1.0 if phase == "dense" else 9.0)

    def job(comm: oktopk.Communicator) -> list[str]:
        with stepping.reducer_on(comm, auto=True, warmup_steps=4) as reducer:
            stepping.record_steps(reducer, comm.rank, range(4 + RETEST))
            state = reducer.state_dict()
        with stepping.reducer_on(comm, auto=True, warmup_steps=4) as resumed:
            resumed.load_state_dict(state)
            return [r.event.phase for r in stepping.record_steps(resumed, comm.rank, range(5))]

    assert stepping.on_ranks(1, job) == [["sparse"] * choice.RETRIAL + ["dense"]]


def test_a_run_resumed_before_its_first_decision_knows_its_dense_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up was before the checkpoint, all sparse steps come after it."""
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 1.0 if phase == "dense" else 9.0)

    def job(comm: oktopk.Communicator) -> list[str]:
        with stepping.reducer_on(comm, auto=True, warmup_steps=4) as reducer:
            stepping.record_steps(reducer, comm.rank, range(4))
            state = reducer.state_dict()
        with stepping.reducer_on(comm, auto=True, warmup_steps=4) as resumed:
            resumed.load_state_dict(state)
            return [r.event.phase for r in stepping.record_steps(resumed, comm.rank, range(4, choice.TRIAL + 5))]

    assert stepping.on_ranks(3, job) == 3 * [["sparse"] * choice.TRIAL + ["dense"]]


def test_momentum_correction_and_a_changing_way_keep_replicas_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    """MomentumStore are a rank's own by the time a bucket goes dense; the result is the same on all ranks."""
    set_clock(monkeypatch, lambda rank, step, bucket, phase: 1.0 if phase == "dense" else 2.0)
    steps = stepping.run_steps(2, 16, auto=True, warmup_steps=4, momentum=0.5)
    assert {step[0].event.phase for step in steps[4:12]} == {"sparse"}
    assert {step[0].event.phase for step in steps[12:]} == {"dense"}
    for step in steps:
        assert stepping.same_bits(step[0].result, step[1].result)


def test_dense_stays_dense_and_is_not_compared() -> None:
    ((ways, figures),) = run_auto(1, 14, warmup=1, compressor="dense")
    assert set(ways) == {"dd"}
    assert figures["bucket0/sparse_seconds"] == 0.0
