"""A thread that runs jobs in order; an error of a job is raised in the thread that waits for it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from ..utils.timeouts import TIMEOUTS

Job = Callable[[], object]

_INTERRUPTED = "interrupted mid-step: this rank may have diverged. Restart from the last checkpoint"


class _Shared:
    """What the thread knows. It does not know the Worker, so that a forgotten Worker can end it."""

    def __init__(self, on_error: Callable[[BaseException], None], wake: Callable[[], None] | None) -> None:
        self.changed = threading.Condition()
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
            with self.changed:
                self.changed.wait_for(lambda: self.jobs or self.closed)
                if not self.jobs:
                    return
                job = self.jobs.popleft()
                self.busy = True
            error = self._do(job)
            del job  # and what it holds
            with self.changed:
                self.busy = False
                self.fail(error)
                self.changed.notify_all()
                if self.error is not None:
                    return

    def fail(self, error: BaseException | None) -> None:
        """With the first error there is: the job of another thread may have failed meanwhile."""
        with self.changed:
            if self.error is None:
                self.error = error
            if self.error is not None:
                self.jobs.clear()
                self.changed.notify_all()

    def _do(self, job: Job) -> BaseException | None:
        """The error of a job, to be raised by whoever waits for it."""
        try:
            job()
        except BaseException as error:
            return self.report(error)
        return None

    def report(self, error: BaseException) -> BaseException:
        """Tell whoever must know; the error that counts then."""
        self.failing = error
        try:
            self.on_error(error)
        except BaseException as second:  # has the first one as its context
            return second
        return error

    def close(self, patience: float, wake: bool) -> bool:
        """Ask the thread to end, and wait for it: with patience, then by waking it; whether it has ended."""
        with self.changed:
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
        with shared.changed:
            self._raise()
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
        self._raise()
        if shared.failing is not None:  # what is begun now, nobody would end
            raise shared.failing
        if shared.closed:
            raise RuntimeError(f"{self._name} is closed")
        try:
            self._do_here(job)
        except Exception:
            raise
        except BaseException:
            shared.fail(RuntimeError(f"{self._name}: {_INTERRUPTED}"))
            raise

    def _do_here(self, job: Job) -> None:
        shared = self._shared
        try:
            job()
        except Exception as error:
            with shared.changed:
                shared.jobs.clear()
            self.wait()  # for the job that is under way: if it fails too, that is the error
            shared.fail(shared.report(error))
            self._raise()

    def wait(self) -> None:
        """Until all jobs are done. They are bounded by the timeouts of what they wait for themselves."""
        shared = self._shared
        with shared.changed:
            while (shared.jobs or shared.busy) and shared.error is None:
                if not shared.changed.wait(TIMEOUTS.poll) and not self.alive and shared.error is None:
                    raise RuntimeError(f"{self._name} has ended without finishing its work")
        self._raise()

    @property
    def alive(self) -> bool:
        return self._shared.thread is not None and self._shared.thread.is_alive()

    def close(self, wake: bool = True) -> bool:
        """Finish the jobs that are there, as far as that takes a few seconds, and end the thread; whether it has.

        An error that nobody has seen is not raised.
        """
        return self._shared.close(TIMEOUTS.close, wake)

    def _raise(self) -> None:
        if self._shared.error is not None:
            raise self._shared.error
