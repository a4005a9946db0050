"""The worker: jobs in order, the first error is the one that counts, and it ends when asked to."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest

from oktopk.engine.worker import Worker
from oktopk.utils.timeouts import TIMEOUTS


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
        assert go_on.wait(60)

    worker = Worker("test worker", report)
    worker.submit(failing)
    assert reporting.wait(60)
    worker.submit(lambda: done.append("late"))
    go_on.set()
    for call in (worker.wait, worker.wait, lambda: worker.submit(lambda: done.append("later"))):
        with pytest.raises(KeyError, match="the original") as caught:
            call()
        assert "failing" in [entry.name for entry in caught.traceback]
    assert worker.close()
    assert (len(seen), done) == (1, [])


def test_an_error_in_the_report_has_the_first_one_as_its_context() -> None:
    def report(error: BaseException) -> None:
        raise OSError("the report failed")

    worker = Worker("test worker", report)
    worker.submit(failing)
    with pytest.raises(OSError, match="the report failed") as caught:
        worker.wait()
    assert isinstance(caught.value.__context__, KeyError)
    worker.close()


def test_a_worker_that_is_stuck_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.engine.worker.TIMEOUTS", replace(TIMEOUTS, close=0.05))
    go_on = threading.Event()
    worker = Worker("test worker", lambda error: None)
    worker.submit(lambda: go_on.wait(60) and None)
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
    thread.join(60)
    assert not thread.is_alive()


def test_a_job_done_here_is_done_by_the_caller_at_once() -> None:
    done: list[int] = []
    worker = Worker("test worker", lambda error: None)
    worker.here(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]
    assert not worker.alive
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.here(lambda: done.append(0))
    assert len(done) == 1


def test_an_error_of_a_job_done_here_counts_like_any_other() -> None:
    """It is told, every call raises it, and what was waiting is not done; the job under way comes to its end."""
    seen: list[BaseException] = []
    begun, go_on, done = threading.Event(), threading.Event(), []
    worker = Worker("test worker", seen.append)

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append("under way")

    def failing_meanwhile() -> None:
        go_on.set()
        failing()

    worker.submit(slow)
    worker.submit(lambda: done.append("waiting"))
    assert begun.wait(60)
    with pytest.raises(KeyError, match="the original"):
        worker.here(failing_meanwhile)
    for call in (worker.wait, lambda: worker.submit(failing), lambda: worker.here(failing)):
        with pytest.raises(KeyError, match="the original"):
            call()
    assert [str(error) for error in seen] == ["'the original'"]
    assert done[0] == "under way"
    assert worker.close()


def test_nothing_goes_on_after_an_interrupt_of_a_job_done_here() -> None:
    """It may have been done by half. The interrupt itself is raised as it came."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    done: list[str] = []
    worker = Worker("test worker", lambda error: done.append("told"))
    with pytest.raises(KeyboardInterrupt):
        worker.here(interrupted)
    for call in (worker.here, worker.submit):
        with pytest.raises(RuntimeError, match=r"interrupted mid-step.*Restart from the last checkpoint"):
            call(lambda: done.append("goes on"))
    assert done == []


def test_an_interrupt_of_the_report_is_raised_once() -> None:
    """A loop that catches it would otherwise never end."""

    def interrupted(error: BaseException) -> None:
        raise KeyboardInterrupt

    worker = Worker("test worker", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.here(failing)
    with pytest.raises(RuntimeError, match="interrupted mid-step"):
        worker.wait()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_nothing_goes_on_after_an_interrupt_of_the_wait(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits does not know the result; signal handlers may raise anything. Jobs behind it are not done."""
    begun, go_on, done = threading.Event(), threading.Event(), []
    worker = Worker("test worker", lambda error: done.append("told"))

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)

    def interrupt(timeout: float) -> bool:
        raise raised

    worker.submit(slow)
    worker.submit(lambda: done.append("waiting"))
    assert begun.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(worker._shared.changed, "wait", interrupt)
        with pytest.raises(raised):
            worker.wait()
    go_on.set()
    assert worker.close()
    for call in (worker.wait, lambda: worker.here(failing), lambda: worker.submit(failing)):
        with pytest.raises(RuntimeError, match=r"interrupted mid-step.*Restart from the last checkpoint"):
            call()
    assert done == []


@pytest.mark.parametrize("stopped", ["doing it", "waiting for the other thread"])
def test_a_job_that_ends_well_does_not_make_up_for_an_interrupt(
    stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread is in the middle of a job then; what waits behind it is not done."""
    begun, go_on, done = threading.Event(), threading.Event(), []
    worker = Worker("test worker", lambda error: None)

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append("under way")

    def interrupt() -> None:
        raise KeyboardInterrupt

    worker.submit(slow)
    worker.submit(lambda: done.append("waiting"))
    assert begun.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.here(interrupt if stopped == "doing it" else failing)
    go_on.set()
    assert worker.close()
    for call in (worker.wait, lambda: worker.here(failing), lambda: worker.submit(failing)):
        with pytest.raises(RuntimeError, match="interrupted mid-step"):
            call()
    assert done == ["under way"]


def test_a_worker_that_is_stuck_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it waits for, after some patience: its job fails, and nobody is left."""
    monkeypatch.setattr("oktopk.engine.worker.TIMEOUTS", replace(TIMEOUTS, close=0.5))
    go_on = threading.Event()
    worker = Worker("test worker", lambda error: None, go_on.set)
    worker.submit(lambda: go_on.wait(60) and None)
    assert worker.close()
    assert go_on.is_set()


def test_a_worker_that_ends_by_itself_is_not_woken() -> None:
    woken: list[str] = []
    worker = Worker("test worker", lambda error: None, lambda: woken.append("woken"))
    worker.submit(lambda: None)
    assert worker.close()
    assert woken == []


def test_a_forgotten_worker_comes_to_its_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for may be somebody else's."""
    monkeypatch.setattr("oktopk.engine.worker.TIMEOUTS", replace(TIMEOUTS, exit=0.05))
    begun, go_on, woken, done = threading.Event(), threading.Event(), [], []

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append("done")

    worker = Worker("forgotten slow worker", lambda error: None, lambda: woken.append("woken"))
    worker.submit(slow)
    assert begun.wait(60)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "forgotten slow worker")
    del worker
    gc.collect()
    go_on.set()
    thread.join(60)
    assert (woken, done) == ([], ["done"])
