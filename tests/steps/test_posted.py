"""Dense sums that are begun at once and looked at later, on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import stepping
import torch
from posting import Poster
from torch import Tensor

import oktopk
from oktopk.engine.settings import Settings
from oktopk.engine.step import StepReducer
from oktopk.feedback.buckets import Bucket
from oktopk.metrics.sinks import MemorySink
from oktopk.metrics.traffic import Operation

ONE, TWO = Bucket(("a",), (5,)), Bucket(("b",), (3,))
BUCKETS = (ONE, TWO)


def steps_on(comm: oktopk.Communicator, *buckets: Bucket, auto: bool = False, warmup: int = 3) -> StepReducer:
    steps = StepReducer(Settings.of("oktopk", 0.4, warmup, None, auto, {}), comm, poster=Poster(comm))
    for bucket in buckets or BUCKETS:  # ranks get to know them
        assert not steps.posts(bucket, own(comm.rank, bucket))
        steps.reduce(bucket, own(comm.rank, bucket))
    steps.finish(0.0, 0.0)
    return steps


def own(rank: int, bucket: Bucket) -> Tensor:
    return torch.arange(1.0, bucket.size + 1) * (rank + 1)


def mean(world: int, bucket: Bucket) -> Tensor:
    return torch.stack([own(rank, bucket) / world for rank in range(world)]).sum(0)


def post_all(steps: StepReducer) -> list[Tensor]:
    grads = [own(steps.meter.rank, bucket) for bucket in BUCKETS]
    for bucket, grad in zip(BUCKETS, grads, strict=True):
        assert steps.posts(bucket, grad)
        steps.post(bucket, grad)
    return grads


@pytest.mark.parametrize("world", [1, 3])
def test_a_step_that_is_taken_back_stays_in_the_residuals(world: int) -> None:
    """Each rank keeps its share of the sums, which go out with the next step, and then nothing is held."""

    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        post_all(steps)
        steps.end_sums(1)
        steps.abandon()
        for bucket in BUCKETS:
            torch.testing.assert_close(steps.reducer.residuals.flat(bucket), mean(world, bucket))
        grads = post_all(steps)
        assert not steps.finish(0.0, 0.0).skipped
        for bucket, grad in zip(BUCKETS, grads, strict=True):
            torch.testing.assert_close(grad, 2 * mean(world, bucket))
        assert steps.reducer.residuals.state_dict() == {}

    stepping.on_ranks(world, job)


def test_sums_that_nobody_waits_for_leave_the_residuals_as_they_were() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        before = steps.reducer.residuals.flat(ONE).copy_(torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])).clone()
        one, two = post_all(steps)
        steps.give_up()
        assert torch.equal(steps.reducer.residuals.flat(ONE), before)
        assert not one.any()
        assert two.any()  # the library may still be at work on it

    stepping.on_ranks(3, job)


def test_a_sum_that_fails_leaves_the_residuals_as_they_were() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        before = steps.reducer.residuals.flat(TWO).copy_(torch.tensor([3.0, 1.0, 4.0])).clone()
        post_all(steps)
        sums = steps._sums.under_way
        sums[1] = sums[1]._replace(wait=broken)
        with pytest.raises(oktopk.CommError, match="nobody there"):
            steps.end_sums()
        steps.give_up()
        assert torch.equal(steps.reducer.residuals.flat(TWO), before)

    def broken() -> None:
        raise oktopk.CommError("nobody there")

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("bad", BUCKETS)
def test_sums_behind_one_that_is_not_finite_are_dropped(bad: Bucket) -> None:
    """As if they had not been begun: what comes before it stays in the residual, what comes after is lost."""

    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        for bucket in BUCKETS:
            grad = own(comm.rank, bucket)
            if bucket == bad and comm.rank == 1:
                grad[-1] = float("inf")
            steps.post(bucket, grad)
        event = steps.finish(0.0, 0.0)
        assert event.skipped
        assert event.culprits == (f"rank 1: {bad.names[0]}",)
        assert set(steps.reducer.residuals.state_dict()) == ({"a"} if bad == TWO else set())

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("held", [0, 1, 2])
def test_all_ranks_see_what_one_had_whoever_has_a_residual(held: int) -> None:
    """One entry tells it: ranks need not agree on who adds a residual, nor look at the whole sum."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE)
        if comm.rank == held:
            steps.reducer.residuals.flat(ONE).fill_(1.0)
        if comm.rank == 1:
            grad[3] = float("nan")
        steps.post(ONE, grad)
        event = steps.finish(0.0, 0.0)
        assert (event.skipped, event.culprits) == (True, ("rank 1: a",))
        assert not grad.any()
        if comm.rank == held:
            assert torch.equal(steps.reducer.residuals.flat(ONE), torch.ones(5))

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("world", [1, 3, 7])
def test_the_largest_numbers_overflow_in_no_sum_unseen(world: int) -> None:
    """A third of the largest number, rounded up, three times: no rank had anything that was not finite."""
    largest = torch.finfo(torch.float32).max

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE)
        grad[2] = largest
        steps.post(ONE, grad)
        event = steps.finish(0.0, 0.0)
        assert (event.skipped, event.culprits) == (True, ("the sum over ranks, which overflows",))
        again = own(comm.rank, ONE)
        again[2] = 0.99 * largest
        steps.post(ONE, again)
        assert not steps.finish(0.0, 0.0).skipped
        assert again.isfinite().all()

    stepping.on_ranks(world, job)


@pytest.mark.parametrize(("world", "lost"), [(2, False), (3, True)])
def test_sums_of_narrow_types_are_looked_at(world: int, lost: bool) -> None:
    """A third of the largest float16 is rounded so far up that three of them are too much, a half is exact."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE).half()
        grad[2] = torch.finfo(torch.float16).max
        steps.post(ONE, grad)
        assert steps._sums.under_way[0].mean.dtype == torch.float16
        event = steps.finish(0.0, 0.0)
        assert event.skipped == lost

    stepping.on_ranks(world, job)


def test_the_first_bucket_that_is_sparse_waits_for_the_sums_before_it() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        steps.step = 2
        grads = [own(comm.rank, bucket) for bucket in BUCKETS]
        steps.post(ONE, grads[0])
        steps.step = 3  # the warm-up has ended
        assert not steps.posts(TWO, grads[1])
        steps.reduce(TWO, grads[1])
        event = steps.finish(0.0, 0.0)
        assert [part.phase for part in event.reductions] == ["dense", "sparse"]
        torch.testing.assert_close(grads[0], mean(comm.world, ONE))

    stepping.on_ranks(3, job)


def test_sums_that_are_under_way_together_share_their_time_by_size() -> None:
    """Two that end together took half of it each if they are of one size; the first has not taken all of it."""

    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        for lane in steps.lanes.values():
            lane.choice.times[True].clear()
        post_all(steps)
        event = steps.finish(0.0, 0.0)
        ((one,), (two,)) = (steps.lanes[bucket].choice.times[True] for bucket in BUCKETS)
        assert one / two == pytest.approx(ONE.size / TWO.size)
        assert one + two == pytest.approx(sum(part.stop - part.start for part in event.reductions))

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("world", [1, 3])
def test_a_step_of_one_sum_is_what_beginning_and_finishing_it_gives(world: int) -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm, ONE), own(comm.rank, ONE)
        assert steps.posts(ONE, grad)
        steps.sum_alone(ONE, grad, None, 0.0)
        torch.testing.assert_close(grad, mean(world, ONE))
        assert steps.last is not None
        assert (steps.last.step, steps.last.skipped, steps.last.volume.count) == (1, False, ONE.size)
        assert steps.last.wire.modelled_bytes == 2 * 4 * ONE.size * (world - 1) // world
        assert steps.step == 2
        assert len(steps.lanes[ONE].choice.times[True]) == 2

    stepping.on_ranks(world, job)


def test_a_step_of_one_sum_that_is_not_finite_is_lost_and_the_next_one_is_not() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm, ONE), own(comm.rank, ONE)
        grad[2] = float("nan") if comm.rank == 1 else 0.0
        steps.sum_alone(ONE, grad, None, 0.0)
        assert steps.last is not None
        assert (steps.last.skipped, steps.last.culprits) == (True, ("rank 1: a",))
        assert not grad.any()
        again = own(comm.rank, ONE)
        steps.sum_alone(ONE, again, None, 0.0)
        torch.testing.assert_close(again, mean(comm.world, ONE))
        assert (steps.step, steps.skipped_steps, steps.skipped_in_a_row) == (3, 1, 0)

    stepping.on_ranks(3, job)


def test_what_one_rank_held_back_goes_with_a_step_of_one_sum() -> None:
    """Others need not know: they take the same way, and get the same."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm, ONE), own(comm.rank, ONE)
        if comm.rank == 1:
            steps.reducer.residuals.flat(ONE).fill_(1.0)
        steps.sum_alone(ONE, grad, None, 0.0)
        torch.testing.assert_close(grad, mean(comm.world, ONE) + 1.0 / comm.world)
        assert steps.reducer.residuals.state_dict() == {}
        assert (steps.step, steps.skipped) == (2, False)

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_steps_of_one_sum_go_by_the_clock_and_are_told_of_as_they_went(world: int) -> None:
    """Each way has its own bytes, whether there is a residual or not."""

    def job(comm: oktopk.Communicator) -> list[tuple[int, int]]:
        steps, told = steps_on(comm, ONE, auto=True, warmup=100), []
        for step in range(6):
            grad = own(comm.rank, ONE)
            if comm.rank == 0 and step % 2:
                steps.reducer.residuals.flat(ONE).fill_(1.0)  # goes the same way as others
            steps.sum_alone(ONE, grad, None, 0.0)
            torch.testing.assert_close(grad, mean(world, ONE) + step % 2 / world)
            assert steps.last is not None
            assert steps.last is steps.last
            assert steps.last.step == step + 1
            assert steps.last.reductions[0].seconds.exchange > 0
            told.append((steps.last.wire.modelled_bytes, len(steps.lanes[ONE].choice.times[True])))
        return told

    size, part = 4 * ONE.size, 4 * -(-ONE.size // world)
    ways = [2 * size * (world - 1) // world, 2 * part * (world - 1), size * (world - 1)]
    for told in stepping.on_ranks(world, job):
        assert [moved for moved, _ in told] == 2 * ways
        assert [timed for _, timed in told] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("scale", [None, 4.0])
def test_who_asks_is_told_what_sinks_are_told_at_once(scale: float | None) -> None:
    """But for the time that it took. With a GradScaler the sum is of what it had not scaled."""

    def job(comm: oktopk.Communicator) -> tuple[Any, ...]:
        told = []
        for sinks in ([MemorySink()], []):
            steps, grad = steps_on(comm, ONE, auto=True, warmup=100), own(comm.rank, ONE)
            steps.sinks += sinks
            steps.sum_alone(ONE, grad * (scale or 1.0), scale, 0.0)
            steps.sum_alone(ONE, grad.mul_(scale or 1.0), scale, 0.0)
            torch.testing.assert_close(grad, mean(comm.world, ONE) * (scale or 1.0))
            event = sinks[0].steps[-1] if sinks else steps.last
            assert event is steps.last
            assert event is not None
            told.append((event.step, event.phase, event.volume, event.local_count, event.wire, event.skipped))
        return tuple(told)

    for eager, late in stepping.on_ranks(3, job):
        assert eager == late
        assert eager[0] == 2


class Broken(Poster):
    """Begins what nobody ends."""

    def post_sum(self, x: Tensor, operation: Operation) -> Callable[[], None]:
        return self.fail

    def post_swap(self, received: Tensor, sent: Tensor, operation: Operation) -> Callable[[], None]:
        return self.fail

    def fail(self) -> None:
        raise oktopk.CommError("nobody there")


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_lone_sum_that_fails_leaves_memory_that_the_library_may_be_at_work_on(held: bool, auto: bool) -> None:
    """Residuals are what they were. Of the ways of small sums the second fails, which has memory of its own."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm, ONE, auto=auto), own(comm.rank, ONE)
        if auto:
            steps.sum_alone(ONE, grad.clone(), None, 0.0)
            assert steps._sums._small is not None
            steps._sums._small._poster = Broken(comm)
        steps._sums._poster = Broken(comm)
        if held:
            steps.reducer.residuals.flat(ONE).fill_(1.0)
        with pytest.raises(oktopk.CommError, match="nobody there"):
            steps.sum_alone(ONE, grad, None, 0.0)
        with pytest.raises(oktopk.CommError, match="was not made"):
            steps.end_sums()
        steps.give_up()
        assert bool(grad.any()) == (not held)
        if held:
            assert torch.equal(steps.reducer.residuals.flat(ONE), torch.ones(5))

    stepping.on_ranks(3, job)


def test_a_bucket_without_entries_is_a_step() -> None:
    def job(comm: oktopk.Communicator) -> None:
        empty = Bucket(("nothing",), (0,))
        steps = steps_on(comm, empty, auto=True, warmup=100)
        for _ in range(4):
            steps.sum_alone(empty, torch.empty(0), None, 0.0)
        assert (steps.step, steps.skipped_steps) == (5, 0)

    stepping.on_ranks(3, job)


def test_only_who_goes_by_the_clock_sums_otherwise_than_the_library() -> None:
    def job(comm: oktopk.Communicator) -> None:
        for auto in (False, True):
            steps = steps_on(comm, ONE, auto=auto)
            assert (steps._sums._small is not None) == (auto and comm.world > 1)
        dense = Settings.of("dense", 0.4, 3, None, True, {})
        assert StepReducer(dense, comm, poster=Poster(comm))._sums._small is None

    for world in (1, 2):
        stepping.on_ranks(world, job)
