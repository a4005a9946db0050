"""Which threads are batch work: gloo's in the groups that oktopk makes, and no other."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import oktopk
from oktopk.comm.process_group.scheduling import batch_scheduled
from tests.support import worlds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the threads of a process")
TASKS, LOOP = Path("/proc/self/task"), "gloo_tcp_loop"


@contextmanager
def thread(name: str) -> Iterator[int]:
    """A native thread of that name, for as long as the block lasts."""
    ready, over = threading.Event(), threading.Event()

    def run() -> None:
        (TASKS / str(threading.get_native_id()) / "comm").write_text(name)
        ready.set()
        over.wait(60)

    one = threading.Thread(target=run)
    one.start()
    try:
        assert ready.wait(60)
        assert one.native_id is not None
        yield one.native_id
    finally:
        over.set()
        one.join()


def test_only_loop_threads_that_start_in_the_block_are_batch_work() -> None:
    with ExitStack() as stack:
        before = stack.enter_context(thread(LOOP))
        with batch_scheduled():
            mine, other = (stack.enter_context(thread(name)) for name in (LOOP, "another"))
        after = stack.enter_context(thread(LOOP))
        policies = [os.sched_getscheduler(one) for one in (before, mine, other, after)]
    assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER]


def loops(connect: Callable[..., Any]) -> tuple[Counter[int], Counter[int]]:
    """Policies of gloo's threads before and after a group of oktopk's own."""

    def policies() -> Counter[int]:
        tasks = [one for one in TASKS.iterdir() if (one / "comm").read_text().strip() == LOOP]
        return Counter(os.sched_getscheduler(int(one.name)) for one in tasks)

    before = policies()
    own = oktopk.GroupCommunicator.exclusive()
    found = before, policies()
    own.close()
    return found


def test_the_group_of_the_user_keeps_its_scheduling() -> None:
    for before, after in worlds.run("gloo", 3, loops):
        assert set(before) == {os.SCHED_OTHER}
        assert after == before + Counter({os.SCHED_BATCH: 1})
