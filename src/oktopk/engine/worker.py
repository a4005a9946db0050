"""A thread that runs jobs in order; an error of a job is raised in the thread that waits for it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..utils.timeouts import TIMEOUTS

Job = Callable[[], object]

_INTERRUPTED = "interrupted mid-step: this rank may have diverged. Restart from the last checkpoint"


class _Shared:
    """What the thread knows. It does not know the Worker, so that a forgotten Worker can end it."""

    def __init__(self, on_error: Callable[[BaseException], None], wake: Callable[[], None] | None) -> None:
        # Taken in C: an interrupt inside Condition.__enter__ would leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.jobs: deque[Job] = deque()
        self.busy = False
        self.closed = False
        self.error: BaseException | None = None
        self.failing: BaseException | None = None
        """The same before all who must know have been told."""
        self.on_error, self.wake = on_error, wake
        self.thread: threading.Thread | None = None

    def run(self) -> None:
        while True:
            with self.lock:
                self.changed.wait_for(lambda: self.jobs or self.closed)
                if not self.jobs:
                    return
                job = self.jobs.popleft()
                self.busy = True
            error = self._do(job)
            del job  # and what it holds
            with self.lock:
                self.busy = False
                self.fail(error)
                self.changed.notify_all()
                if self.error is not None:
                    return

    def fail(self, error: BaseException | None) -> None:
        """With the first error there is: the job of another thread may have failed meanwhile."""
        with self.lock:
            if self.error is None:
                self.error = error
            if self.error is not None:
                self.jobs.clear()
                self.changed.notify_all()

    def _do(self, job: Job) -> BaseException | None:
        """The error of a job, to be raised by whoever waits for it."""
        try:
            try:
                job()
            except BaseException as error:
                return self.report(error)
        except BaseException as second:
            return second
        return None

    def report(self, error: BaseException) -> BaseException:
        """Tell whoever must know; the error that counts then."""
        self.failing = error
        try:
            self.on_error(error)
        except Exception as second:  # has the first one as its context
            return second
        return error

    def close(self, patience: float, wake: bool) -> bool:
        """Ask the thread to end, and wait for it: with patience, then by waking it; whether it has ended."""
        with self.lock:
            self.closed = True
            self.changed.notify_all()
        if self.thread is None or self.thread is threading.current_thread():
            return True
        self.thread.join(patience)
        if wake and self.thread.is_alive() and self.wake is not None:
            self.wake()
            self.thread.join(TIMEOUTS.close)
        return not self.thread.is_alive()

    def leave(self) -> None:
        """The process ends; or nobody knows the worker any more, whose thread then comes to its end by itself."""
        self.close(TIMEOUTS.exit, wake=not threading.main_thread().is_alive())


class Worker:
    """Starts its thread with the first job. After an error it takes no more: each call raises that error.

    `wake` ends, by an error, whatever a job waits for. It is called from another thread, when the worker shall end
    and does not.
    """

    def __init__(
        self, name: str, on_error: Callable[[BaseException], None], wake: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._shared = _Shared(on_error, wake)
        # Also at exit: a thread that comes back from native code into an interpreter that is gone aborts the
        # process. If all ranks leave at once, as by Ctrl-C, each one's thread waits for the others.
        self._finalizer = weakref.finalize(self, self._shared.leave)

    def submit(self, job: Job) -> None:
        shared = self._shared
        with shared.lock:
            self.check()
            if shared.closed:
                raise RuntimeError(f"{self._name} is closed")
            shared.jobs.append(job)
            shared.changed.notify_all()
        if shared.thread is None:
            shared.thread = threading.Thread(target=shared.run, name=self._name, daemon=True)
            shared.thread.start()

    def here(self, job: Job) -> None:
        """Do a job at once, in the thread of the caller. An error counts like one of the other thread."""
        shared = self._shared
        self.check()
        if shared.failing is not None:  # what is begun now, nobody would end
            raise shared.failing
        if shared.closed:
            raise RuntimeError(f"{self._name} is closed")
        with self.uninterrupted():
            self._do_here(job)

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """A block of which a part is worse than nothing: after an interrupt inside it every call is an error.

        The interrupt itself is raised as it came. The other ranks are not told: they may have got one too.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _interrupted(self) -> None:
        self._shared.fail(RuntimeError(f"{self._name}: {_INTERRUPTED}"))

    def _do_here(self, job: Job) -> None:
        shared = self._shared
        try:
            job()
        except Exception as error:
            with shared.lock:
                shared.jobs.clear()
            self.wait()  # for the job that is under way: if it fails too, that is the error
            shared.fail(shared.report(error))
            self.check()

    def wait(self) -> None:
        """Until all jobs are done. They are bounded by the timeouts of what they wait for themselves."""
        try:
            self._wait()
        except BaseException:  # also what a signal handler raises
            self._interrupted()
            raise
        self.check()

    def _wait(self) -> None:
        shared = self._shared
        with shared.lock:
            while (shared.jobs or shared.busy) and shared.error is None:
                if not shared.changed.wait(TIMEOUTS.poll) and not self.alive:
                    shared.fail(RuntimeError(f"{self._name} has ended without finishing its work"))

    @property
    def alive(self) -> bool:
        return self._shared.thread is not None and self._shared.thread.is_alive()

    def close(self, wake: bool = True) -> bool:
        """Finish the jobs that are there, as far as that takes a few seconds, and end the thread; whether it has.

        An error that nobody has seen is not raised.
        """
        return self._shared.close(TIMEOUTS.close, wake)

    def check(self) -> None:
        """Raise the error that there was, if any."""
        if self._shared.error is not None:
            raise self._shared.error
