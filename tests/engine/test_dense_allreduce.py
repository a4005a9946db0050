"""Dense sums that are begun at once and waited for at the end of the step, on ranks as threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.engine.async_reducer import AsyncReducer
from oktopk.engine.settings import Settings
from oktopk.engine.step import StepReducer
from oktopk.feedback.buckets import Bucket
from oktopk.metrics.events import StepEvent
from oktopk.metrics.sinks import MemorySink
from tests.support import stepping
from tests.support.pending import LateSums

ONE, TWO = Bucket(("a",), (5,)), Bucket(("b",), (3,))
BUCKETS = (ONE, TWO)


def settings_of(warmup: int = 100, **options: Any) -> Settings:
    return Settings(oktopk.ALGORITHMS["oktopk"](), 0.4, warmup, **options)


def steps_on(comm: oktopk.Communicator, warmup: int = 100, **options: Any) -> StepReducer:
    return StepReducer(settings_of(warmup, **options), LateSums(comm))


def late(steps: StepReducer) -> LateSums:
    assert isinstance(steps.meter.inner, LateSums)
    return steps.meter.inner


def own(rank: int, bucket: Bucket) -> Tensor:
    return torch.arange(1.0, bucket.size + 1) * (rank + 1)


def mean(world: int, bucket: Bucket) -> Tensor:
    return torch.stack([own(rank, bucket) / world for rank in range(world)]).sum(0)


def begin_all(
    steps: StepReducer, grads: Sequence[Tensor] | None = None, buckets: Sequence[Bucket] = BUCKETS
) -> list[Tensor]:
    """Begin the sums of a step: none is made yet."""
    given = [own(steps.meter.rank, bucket) for bucket in buckets] if grads is None else list(grads)
    steps.begin()
    for bucket, grad in zip(buckets, given, strict=True):
        steps.reduce(bucket, grad)
    assert len(late(steps).begun) == len(given)
    return given


def finish(steps: StepReducer) -> StepEvent:
    now = time.perf_counter()
    event = steps.finish(now, now)
    assert late(steps).begun == []
    return event


@pytest.mark.parametrize("world", [1, 3])
def test_the_mean_is_there_when_the_step_is_finished(world: int) -> None:
    """Until then nobody waits, and the memory that is summed is that of the gradients: nothing is copied."""

    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        for number in range(3):
            grads = begin_all(steps)
            assert [x is grad for x, grad in zip(late(steps).begun, grads, strict=True)] == [True, True]
            event = finish(steps)
            assert (event.step, event.skipped, event.volume.count) == (number, False, ONE.size + TWO.size)
            sizes = [bucket.size for bucket in BUCKETS]
            assert event.wire.modelled_bytes == sum(2 * 4 * size * (world - 1) // world for size in sizes)
            for bucket, grad in zip(BUCKETS, grads, strict=True):
                torch.testing.assert_close(grad, mean(world, bucket))
        assert steps.step == 3

    stepping.on_ranks(world, job)


@pytest.mark.parametrize("world", [1, 3])
def test_a_step_that_is_abandoned_stays_in_the_residuals(world: int) -> None:
    """Each rank keeps its share of the sums, which go out with the next step, and then nothing is held."""

    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        begin_all(steps)
        steps.abandon()
        assert late(steps).begun == []
        for bucket in BUCKETS:
            torch.testing.assert_close(steps.reducer.residuals.flat(bucket), mean(world, bucket))
        grads = begin_all(steps)
        assert not finish(steps).skipped
        for bucket, grad in zip(BUCKETS, grads, strict=True):
            torch.testing.assert_close(grad, 2 * mean(world, bucket))
        assert steps.reducer.residuals.state_dict() == {}

    stepping.on_ranks(world, job)


def test_sums_that_nobody_waits_for_leave_the_residuals_as_they_were() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        before = steps.reducer.residuals.flat(ONE).copy_(torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])).clone()
        one, two = begin_all(steps)
        steps.give_up()
        assert torch.equal(steps.reducer.residuals.flat(ONE), before)
        assert not one.any()
        assert two.any()  # the library may still be at work on it

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_sum_that_fails_leaves_the_residuals_as_they_were(broken: int) -> None:
    """The second one: the first was made, and each rank keeps its share."""

    def job(comm: oktopk.Communicator) -> None:
        steps, held = steps_on(comm), (ONE, TWO)[broken]
        before = steps.reducer.residuals.flat(held).copy_(torch.arange(3.0, 3.0 + held.size)).clone()
        begin_all(steps)
        if broken:
            result = steps._dense.finish_next(steps._report, 0)
            assert result is not None
            steps._results += result[0]
        late(steps).broken = True
        with pytest.raises(oktopk.CommError, match="nobody there"):
            steps.finish(0.0, 0.0)
        steps.give_up()
        assert torch.equal(steps.reducer.residuals.flat(held), before)
        if broken:
            torch.testing.assert_close(steps.reducer.residuals.flat(ONE), mean(comm.world, ONE))

    stepping.on_ranks(3, job)


def test_a_sum_that_cannot_be_begun_leaves_the_residuals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise oktopk.CommError("nobody there")

    monkeypatch.setattr(LateSums, "begin_all_reduce", refuse)
    steps = steps_on(oktopk.comm.alone())
    before = steps.reducer.residuals.flat(ONE).copy_(torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])).clone()
    steps.begin()
    with pytest.raises(oktopk.CommError, match="nobody there"):
        steps.reduce(ONE, own(0, ONE))
    assert torch.equal(steps.reducer.residuals.flat(ONE), before)
    steps.give_up()
    assert torch.equal(steps.reducer.residuals.flat(ONE), before)


@pytest.mark.parametrize("held", [False, True])
def test_a_lone_sum_that_fails_leaves_memory_that_may_be_in_use(held: bool) -> None:
    """Residuals are what they were; a bucket that had one was summed in memory of its own."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE)
        if held:
            steps.reducer.residuals.flat(ONE).fill_(1.0)
        begin_all(steps, [grad], [ONE])
        late(steps).broken = True
        with pytest.raises(oktopk.CommError, match="nobody there"):
            steps.finish(0.0, 0.0)
        steps.give_up()
        assert bool(grad.any()) == (not held)
        if held:
            assert torch.equal(steps.reducer.residuals.flat(ONE), torch.ones(5))

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("bad", BUCKETS)
def test_sums_behind_one_that_is_not_finite_are_dropped(bad: Bucket) -> None:
    """As if they had not been begun: what comes before it stays in the residual, what comes after is lost."""

    def job(comm: oktopk.Communicator) -> None:
        steps = steps_on(comm)
        grads = [own(comm.rank, bucket) for bucket in BUCKETS]
        if comm.rank == 1:
            grads[BUCKETS.index(bad)][-1] = float("inf")
        begin_all(steps, grads)
        event = finish(steps)
        assert event.skipped
        assert event.culprits == (f"rank 1: {bad.names[0]}",)
        assert set(steps.reducer.residuals.state_dict()) == ({"a"} if bad == TWO else set())
        assert not any(grad.any() for grad in grads)
        again = begin_all(steps)  # what was lost is not lost twice
        assert not finish(steps).skipped
        torch.testing.assert_close(again[0], (2 if bad == TWO else 1) * mean(comm.world, ONE))
        torch.testing.assert_close(again[1], mean(comm.world, TWO))
        assert (steps.step, steps.skips.total, steps.skips.in_a_row) == (2, 1, 0)

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("held", [0, 1, 2])
def test_all_ranks_see_what_one_had_whoever_has_a_residual(held: int) -> None:
    """One entry tells it: ranks need not agree on who adds a residual, nor inspect the whole sum."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE)
        if comm.rank == held:
            steps.reducer.residuals.flat(ONE).fill_(1.0)
        if comm.rank == 1:
            grad[3] = float("nan")
        begin_all(steps, [grad], [ONE])
        event = finish(steps)
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
        begin_all(steps, [grad], [ONE])
        event = finish(steps)
        assert (event.skipped, event.culprits) == (True, ("the sum over ranks, which overflows",))
        again = own(comm.rank, ONE)
        again[2] = 0.99 * largest
        begin_all(steps, [again], [ONE])
        assert not finish(steps).skipped
        assert again.isfinite().all()

    stepping.on_ranks(world, job)


@pytest.mark.parametrize(("world", "lost"), [(2, False), (3, True)])
def test_sums_of_narrow_types_are_inspected(world: int, lost: bool) -> None:
    """A third of the largest float16 is rounded so far up that three of them are too much, a half is exact."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE).half()
        grad[2] = torch.finfo(torch.float16).max
        begin_all(steps, [grad], [ONE])
        assert late(steps).begun[0].dtype == torch.float16
        event = finish(steps)
        assert event.skipped == lost
        assert event.culprits == (("the sum over ranks: a",) if lost else ())

    stepping.on_ranks(world, job)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_of_other_types_than_float32_only_the_sum_is_known(dtype: torch.dtype) -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE).to(dtype)
        if comm.rank == 1:
            grad[2] = float("nan")
        begin_all(steps, [grad], [ONE])
        assert finish(steps).culprits == ("the sum over ranks: a",)

    stepping.on_ranks(3, job)


def test_what_one_rank_held_back_goes_out_with_a_dense_step() -> None:
    """Others need not know: they sum the same, and get the same."""

    def job(comm: oktopk.Communicator) -> None:
        steps, grad = steps_on(comm), own(comm.rank, ONE)
        if comm.rank == 1:
            steps.reducer.residuals.flat(ONE).fill_(1.0)
        begin_all(steps, [grad], [ONE])
        assert not finish(steps).skipped
        torch.testing.assert_close(grad, mean(comm.world, ONE) + 1.0 / comm.world)
        assert steps.reducer.residuals.state_dict() == {}

    stepping.on_ranks(3, job)


# Dense buckets in sparse steps.


def mixed(
    comm: oktopk.Communicator, order: Sequence[Bucket], bad: dict[Bucket, int]
) -> tuple[StepReducer, StepEvent]:
    """A sparse step where bucket "b" is always dense; `bad` buckets hold a NaN on one rank."""
    steps = steps_on(comm, warmup=0, dense=("b",), fusion_entries=0)
    steps.begin()
    grads = {bucket: own(comm.rank, bucket) for bucket in order}
    for bucket, rank in bad.items():
        if comm.rank == rank:
            grads[bucket][1] = float("nan")
    for bucket in order:
        steps.reduce(bucket, grads[bucket])
    event = finish(steps)
    if event.skipped:
        assert not any(grad.any() for grad in grads.values())
    else:
        torch.testing.assert_close(grads[TWO], mean(comm.world, TWO))
    return steps, event


@pytest.mark.parametrize("order", [(ONE, TWO), (TWO, ONE)])
def test_reductions_are_in_the_order_of_the_buckets(order: Sequence[Bucket]) -> None:
    """Though a dense sum is waited for when the sparse buckets behind it have been exchanged."""

    def job(comm: oktopk.Communicator) -> None:
        _, event = mixed(comm, order, {})
        assert [part.bucket for part in event.reductions] == [0, 1]
        assert [part.phase for part in event.reductions] == [
            "dense" if bucket == TWO else "sparse" for bucket in order
        ]

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("order", [(ONE, TWO), (TWO, ONE)])
@pytest.mark.parametrize("bad", BUCKETS)
def test_dense_and_sparse_buckets_are_skipped_together(bad: Bucket, order: Sequence[Bucket]) -> None:
    """The other bucket stays in the residuals, unless it came after the one that lost the step."""

    def job(comm: oktopk.Communicator) -> tuple[bool, Tensor]:
        steps, event = mixed(comm, order, {bad: 1})
        assert (event.skipped, event.culprits) == (True, (f"rank 1: {bad.names[0]}",))
        (other,) = set(BUCKETS) - {bad}
        return other.names[0] in steps.reducer.residuals.state_dict(), steps.reducer.residuals.flat(other)

    (other,) = set(BUCKETS) - {bad}
    for known, total in [(ranks[0][0], sum(kept for _, kept in ranks)) for ranks in [stepping.on_ranks(3, job)]]:
        exchanged = order[0] == other or other == ONE  # sparse buckets do not wait for the dense sum before them
        assert known == exchanged
        expected = 3 * mean(3, other) if exchanged else torch.zeros(other.size)
        torch.testing.assert_close(torch.as_tensor(total), expected)


@pytest.mark.parametrize("order", [(ONE, TWO), (TWO, ONE)])
def test_two_ranks_with_two_bad_buckets_name_one_of_them(order: Sequence[Bucket]) -> None:
    """The sparse one: what its exchange has found is not forgotten when the dense sum is bad, too."""

    def job(comm: oktopk.Communicator) -> None:
        _, event = mixed(comm, order, {ONE: 0, TWO: 2})
        assert (event.skipped, event.culprits) == (True, ("rank 0: a",))

    stepping.on_ranks(3, job)


# Figures.


def test_sums_that_are_under_way_together_are_not_counted_twice() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, start = steps_on(comm), time.perf_counter()
        begin_all(steps)
        event = steps.finish(start, time.perf_counter())
        one, two = event.reductions
        assert one.start <= one.stop <= two.start <= two.stop
        assert event.seconds.total == pytest.approx(one.stop - one.start + two.stop - two.start)
        assert event.seconds.total <= event.stop - event.start
        assert one.seconds.exchange > 0

    stepping.on_ranks(3, job)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_sinks_are_told_what_who_asks_is_told(scale: float | None) -> None:
    """With a GradScaler the sum is of what it had not scaled."""

    def job(comm: oktopk.Communicator) -> None:
        steps, sink, grad = steps_on(comm), MemorySink(), own(comm.rank, ONE) * (scale or 1.0)
        steps.sinks.add(sink)
        for number in range(2):
            steps.begin()
            steps.reduce(ONE, grad, scale)
            event = finish(steps)
            assert sink.steps[-1] is event is steps.last
            assert (event.step, event.phase, event.local_count) == (number, "dense", ONE.size)
            torch.testing.assert_close(grad, mean(comm.world, ONE) * (scale or 1.0))
            grad = own(comm.rank, ONE) * (scale or 1.0)

    stepping.on_ranks(3, job)


def test_a_bucket_without_entries_is_a_step() -> None:
    def job(comm: oktopk.Communicator) -> None:
        empty, steps = Bucket(("nothing",), (0,)), steps_on(comm)
        for _ in range(4):
            begin_all(steps, [torch.empty(0)], [empty])
            assert not finish(steps).skipped
        assert (steps.step, steps.skips.total) == (4, 0)

    stepping.on_ranks(3, job)


# Through the engine: no thread is woken in a dense step.


@pytest.mark.parametrize("warmup", [0, 100])
def test_only_sparse_steps_have_a_worker(warmup: int) -> None:
    def job(comm: oktopk.Communicator) -> None:
        sums = LateSums(comm)
        engine = AsyncReducer(settings_of(warmup), sums, owns_comm=False)
        for _ in range(2):
            grads = {bucket: own(comm.rank, bucket) for bucket in BUCKETS}
            for bucket, grad in grads.items():
                engine.submit(bucket, grad)
            assert len(sums.begun) == (2 if warmup else 0)
            assert not engine.finish().skipped
            if warmup:
                torch.testing.assert_close(grads[ONE], mean(comm.world, ONE))
        assert engine._worker.alive == (warmup == 0)
        engine.close()

    stepping.on_ranks(3, job)


def test_a_dense_step_of_the_engine_can_be_abandoned() -> None:
    def job(comm: oktopk.Communicator) -> None:
        sums = LateSums(comm)
        engine = AsyncReducer(settings_of(), sums, owns_comm=False)
        engine.abandon()  # nothing there
        engine.submit(ONE, own(comm.rank, ONE))
        engine.abandon()
        assert (sums.begun, engine.step) == ([], 0)
        grad = own(comm.rank, ONE)
        engine.submit(ONE, grad)
        assert not engine.finish().skipped
        torch.testing.assert_close(grad, 2 * mean(comm.world, ONE))
        engine.close()

    stepping.on_ranks(3, job)


def test_a_dense_sum_that_fails_ends_the_engine() -> None:
    """Every call raises it, and the residuals are as they were."""

    def job(comm: oktopk.Communicator) -> None:
        sums = LateSums(comm)
        engine = AsyncReducer(settings_of(), sums, owns_comm=False)
        engine._steps.reducer.residuals.flat(ONE).fill_(1.0)
        engine.submit(ONE, own(comm.rank, ONE))
        sums.broken = True
        for call in (engine.finish, engine.drain, engine.state_dict):
            with pytest.raises(oktopk.CommError, match="nobody there"):
                call()
        assert torch.equal(engine._steps.reducer.residuals.flat(ONE), torch.ones(5))
        engine.close()

    with pytest.raises(oktopk.CommError, match="nobody there"):
        stepping.on_ranks(3, job)
