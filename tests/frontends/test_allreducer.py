"""AllReducer's worker thread: waiting, ending, errors, and what it measures."""

from __future__ import annotations

import errno
import gc
import json
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import oktopk
from oktopk.algorithms import OkTopk, TopkA
from oktopk.metrics.sinks import JSONLSink, MemorySink
from tests.support import stepping
from tests.support.stepping import gradients, on_ranks, record_steps, reducer_on

ENOUGH = 10.0
"""Seconds after which somebody who should have been told is considered to hang."""


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("oktopk worker")]


# Waiting and ending.


def test_drain_waits_for_what_was_submitted() -> None:
    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, buckets=stepping.SEVERAL) as reducer:
            reducer._engine.drain()  # nothing there: returns at once
            grads = gradients(comm.rank, 0)
            for bucket in reducer.buckets:
                stepping.submit(reducer, bucket, grads)
            reducer._engine.drain()
            assert reducer.step == 0
            stepping.finish(reducer, grads)
            assert reducer.step == 1

    on_ranks(2, job)


def test_finish_without_a_bucket_is_an_error() -> None:
    with reducer_on(None) as reducer, pytest.raises(RuntimeError, match="without a submitted bucket"):
        reducer._engine.finish()


@pytest.mark.parametrize("world", [1, 2, 5])
def test_close_ends_the_thread_and_may_come_twice(world: int) -> None:
    before = len(workers())

    def job(comm: oktopk.Communicator) -> None:
        reducer = reducer_on(comm)
        record_steps(reducer, comm.rank, range(3))
        reducer.close()
        reducer.close()
        assert not any(thread.name.endswith(f"rank {comm.rank}") for thread in workers())
        with pytest.raises(RuntimeError, match="is closed"):
            reducer.sync(gradients(comm.rank, 3))

    on_ranks(world, job)
    assert len(workers()) == before


def test_closing_twice_writes_one_end(tmp_path: Path) -> None:
    reducer = reducer_on(None, sinks=[JSONLSink(tmp_path / "metrics.jsonl")])
    reducer.sync(gradients(0, 0))
    reducer.close()
    reducer.close()
    events = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events.count("end") == 1


def test_one_that_was_never_used_has_no_thread() -> None:
    before = len(workers())
    reducer = reducer_on(None)
    assert len(workers()) == before
    reducer.close()


def test_a_forgotten_reducer_ends_its_thread() -> None:
    before = set(workers())
    reducer = reducer_on(None)
    record_steps(reducer, 0, range(3))
    (mine,) = set(workers()) - before
    del reducer
    gc.collect()
    mine.join(ENOUGH)
    assert not mine.is_alive()


def test_close_closes_sinks() -> None:
    class Closing(MemorySink):
        closed = 0

        def _close(self) -> None:
            self.closed += 1

    sink = Closing()
    with reducer_on(None, sinks=[sink]) as reducer:
        record_steps(reducer, 0, range(2))
        assert sink.closed == 0
    reducer.close()
    assert sink.closed == 1
    assert [event.step for event in sink.steps] == [0, 1]


# Errors.


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("algorithm", [OkTopk, TopkA])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_error_in_the_worker_reaches_every_main_thread(
    world: int, algorithm: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing rank sees where it happened; the others are told who failed, long before their timeout.

    They hear of it when they communicate next: in the same step, or in the one before if they are still in it.
    """
    reduce = algorithm.reduce

    def snaps_in_step_3(self: Any, channel: Any, *args: Any) -> Any:
        if channel.rank == world - 1 and channel.step == 3:
            raise Broken("a broken algorithm")
        return reduce(self, channel, *args)

    monkeypatch.setattr(algorithm, "reduce", snaps_in_step_3)
    seen: dict[int, tuple[int, BaseException]] = {}
    done: dict[int, int] = {}

    def job(comm: oktopk.Communicator) -> None:
        reducer = reducer_on(comm, algorithm(), warmup_steps=1)
        done[comm.rank] = 0
        try:
            for step in range(6):
                reducer.sync(gradients(comm.rank, step))
                done[comm.rank] += 1
        except RuntimeError as error:
            seen[comm.rank] = (done[comm.rank], error)
        for call in (reducer._engine.drain, reducer.state_dict, lambda: reducer.sync(gradients(comm.rank, 9))):
            with pytest.raises(type(seen[comm.rank][1])):
                call()
        reducer.close()

    start = time.monotonic()
    with pytest.raises(Broken):
        on_ranks(world, job, timeout=100.0)
    assert time.monotonic() - start < 50.0  # half of the timeout: nobody waited for it
    assert sorted(seen) == list(range(world))
    for rank, (steps, error) in seen.items():
        if rank == world - 1:
            assert steps == 3
            assert isinstance(error, Broken)
            assert "snaps_in_step_3" in "".join(traceback.format_exception(error))
        else:
            assert steps in (2, 3)
            assert isinstance(error, oktopk.Aborted)
            assert f"rank {world - 1} failed" in str(error)
            assert "a broken algorithm" in str(error)


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout() -> None:
    errors: list[str] = []

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm) as reducer:
            if comm.rank == 0:
                with pytest.raises(oktopk.CommTimeout) as error:
                    reducer.sync(gradients(0, 0))
                errors.append(str(error.value))

    with pytest.raises(oktopk.CommTimeout):
        on_ranks(2, job, timeout=0.5)
    assert "no message from rank 1 within 0.5 s" in errors[0]


def test_a_sink_that_fails_fails_the_step() -> None:
    class Full(MemorySink):
        def _write(self, event: Any) -> None:
            raise OSError("unplugged")

    with reducer_on(None, sinks=[Full()]) as reducer, pytest.raises(OSError, match="unplugged"):
        reducer.sync(gradients(0, 0))


def test_any_sink_on_a_full_disk_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """One that is not of oktopk.metrics.sinks, given at the start or added later; the others go on."""

    class Full:
        calls = 0

        def emit(self, event: Any) -> None:
            self.calls += 1
            raise OSError(errno.ENOSPC, "No space left on device", "log")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "log")

    first, second, other = Full(), Full(), MemorySink()
    with reducer_on(None, sinks=[first, other]) as reducer:
        reducer.add_sink(second)
        for step in range(3):
            reducer.sync(gradients(0, step))
    assert (first.calls, second.calls, len(other.steps)) == (1, 1, 3)
    said = [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]
    assert said == ["Full is switched off, and training continues without it: log: No space left on device"] * 2


# What it measures.


def test_hidden_and_exposed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that takes long is done before the last one is handed in: most of the work was hidden."""
    reduce = OkTopk.reduce

    def slow_in_bucket_0(self: Any, channel: Any, *args: Any) -> Any:
        time.sleep(0.3 if channel.bucket == 0 else 0.0)
        return reduce(self, channel, *args)

    monkeypatch.setattr(OkTopk, "reduce", slow_in_bucket_0)
    grads = gradients(0, 0)
    with reducer_on(None, buckets=[["a", "b", "c"], ["d"]], warmup_steps=0) as reducer:
        first, last = reducer.buckets
        stepping.submit(reducer, first, grads)
        reducer._engine.drain()
        stepping.submit(reducer, last, grads)
        stepping.finish(reducer, grads)
        event = reducer.last
        assert event is not None
        figures = reducer.stats()
    assert event.start < event.reductions[0].start < event.reductions[0].stop <= event.handed_over < event.stop
    assert event.exposed == event.stop - event.handed_over
    assert event.hidden_share > 0.5
    assert figures["hidden_share"] == event.hidden_share
    assert figures["exposed_seconds"] == event.exposed


@pytest.mark.parametrize("algorithm", list(oktopk.ALGORITHMS))
def test_times_and_traffic_are_consistent(algorithm: str) -> None:
    for step in stepping.run_steps(3, 4, algorithm=algorithm, buckets=stepping.SEVERAL):
        for record in step:
            event = record.event
            assert 0.0 <= event.hidden_share <= 1.0
            assert 0.0 <= event.exposed <= event.stop - event.start
            for part in event.reductions:
                assert min(vars(part.seconds).values()) >= 0.0
                assert part.seconds.total <= (part.stop - part.start) * 1.001 + 1e-4
                assert all(part.start <= span.start <= span.stop <= part.stop for span in part.spans)
            assert event.seconds.total == pytest.approx(sum(part.seconds.total for part in event.reductions))
        sent, received = (
            sum(getattr(r.event.wire, what) for r in step) for what in ("sent_bytes", "received_bytes")
        )
        assert sent == received > 0


@pytest.mark.parametrize("algorithm", ["topka", "oktopk"])
def test_the_rank_that_everybody_waits_for_is_found(algorithm: str) -> None:
    sleeper = 1

    def job(comm: oktopk.Communicator) -> Counter[int | None]:
        found: Counter[int | None] = Counter()
        with reducer_on(comm, algorithm, warmup_steps=0) as reducer:
            for step in range(10):
                if comm.rank == sleeper:
                    time.sleep(0.15)  # longer than a busy machine keeps another one from running
                reducer.sync(gradients(comm.rank, step))
                assert reducer.last is not None
                found[reducer.last.slowest_rank] += step > 1
        return found

    for found in on_ranks(3, job):
        assert found.most_common(1)[0][0] == sleeper
        assert found[sleeper] >= 6
