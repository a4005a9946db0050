"""One thread that does jobs in the order they come in, and whose errors are raised where one waits for it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]

_CHECK_SECONDS = 1.0
_FAREWELL_SECONDS = 5.0


class _Shared:
    """What the thread knows. It does not know the Worker, so that a forgotten Worker can end it."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self.changed = threading.Condition()
        self.jobs: deque[Job] = deque()
        self.busy = False
        self.closed = False
        self.error: BaseException | None = None
        self.on_error = on_error
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
                self.error = error
                self.changed.notify_all()
                if error is not None:
                    self.jobs.clear()
                    return

    def _do(self, job: Job) -> BaseException | None:
        """The error of a job, to be raised by whoever waits for it."""
        try:
            job()
        except BaseException as error:
            try:
                self.on_error(error)
            except BaseException as second:  # has the first one as its context
                return second
            return error
        return None

    def close(self, patience: float) -> bool:
        """Ask the thread to end, and wait for it; whether it has ended."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        if self.thread is None or self.thread is threading.current_thread():
            return True
        self.thread.join(patience)
        return not self.thread.is_alive()


class Worker:
    """Starts its thread with the first job. After an error it takes no more: each call raises that error."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None], patience: float = 0.5) -> None:
        self._name = name
        self._shared = _Shared(on_error)
        # Also at exit: a thread that comes back from native code into an interpreter that is gone aborts the
        # process. If all ranks leave at once, as by Ctrl-C, each one's thread waits for the others; so they are
        # patient for different times, and whoever goes first wakes the threads of all others.
        self._finalizer = weakref.finalize(self, self._shared.close, patience)

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

    def wait(self) -> None:
        """Until all jobs are done. They are bounded by the timeouts of what they wait for themselves."""
        shared = self._shared
        with shared.changed:
            while (shared.jobs or shared.busy) and shared.error is None:
                if not shared.changed.wait(_CHECK_SECONDS) and not self.alive:
                    raise RuntimeError(f"{self._name} has ended without finishing its work")
        self._raise()

    @property
    def alive(self) -> bool:
        return self._shared.thread is not None and self._shared.thread.is_alive()

    def close(self) -> bool:
        """Finish the jobs that are there and end the thread; whether it has ended within a few seconds.

        An error that nobody has seen is not raised.
        """
        return self._shared.close(_FAREWELL_SECONDS)

    def _raise(self) -> None:
        if self._shared.error is not None:
            raise self._shared.error
