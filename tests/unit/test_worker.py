"""The worker: jobs in order, the first error is the one that counts, and it ends when asked to."""

from __future__ import annotations

import gc
import threading

import pytest

from oktopk.worker import Worker


def failing() -> None:
    raise KeyError("the original")


def test_jobs_are_done_in_order() -> None:
    done: list[int] = []
    worker = Worker("test worker", lambda error: None)
    for number in range(100):
        worker.submit(lambda number=number: done.append(number))
    worker.wait()
    assert done == list(range(100))
    assert worker.close()


def test_after_an_error_nothing_more_is_done_and_every_call_raises_it() -> None:
    """Also when jobs were waiting behind the one that failed, or come in while the error is being reported."""
    seen: list[BaseException] = []
    reporting, go_on, done = threading.Event(), threading.Event(), []

    def report(error: BaseException) -> None:
        seen.append(error)
        reporting.set()
        assert go_on.wait(10)

    worker = Worker("test worker", report)
    worker.submit(failing)
    assert reporting.wait(10)
    worker.submit(lambda: done.append("late"))
    go_on.set()
    for call in (worker.wait, worker.wait, lambda: worker.submit(lambda: done.append("later"))):
        with pytest.raises(KeyError, match="the original") as caught:
            call()
        assert "failing" in [entry.name for entry in caught.traceback]
    assert worker.close()
    assert (len(seen), done) == (1, [])


def test_an_error_in_the_report_is_raised_with_the_first_one_as_its_context() -> None:
    def report(error: BaseException) -> None:
        raise OSError("the report failed")

    worker = Worker("test worker", report)
    worker.submit(failing)
    with pytest.raises(OSError, match="the report failed") as caught:
        worker.wait()
    assert isinstance(caught.value.__context__, KeyError)
    worker.close()


def test_a_worker_that_is_stuck_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.worker._FAREWELL_SECONDS", 0.05)
    go_on = threading.Event()
    worker = Worker("test worker", lambda error: None)
    worker.submit(lambda: go_on.wait(10) and None)
    assert not worker.close()
    go_on.set()
    assert worker.close()


def test_a_forgotten_worker_ends_its_thread() -> None:
    worker = Worker("forgotten worker", lambda error: None)
    worker.submit(lambda: None)
    worker.wait()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "forgotten worker")
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
