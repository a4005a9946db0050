"""Which threads are batch work: those of the name that are started in the block, and gloo's in groups of ours."""

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
import worlds

import oktopk
from oktopk.comm.unhurried import unhurried

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the threads of a process")
TASKS = Path("/proc/self/task")


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


def test_only_those_of_the_name_that_are_started_within_the_block() -> None:
    with ExitStack() as stack:
        before = stack.enter_context(thread("loop"))
        with unhurried("loop"):
            mine, theirs = (stack.enter_context(thread(name)) for name in ("loop", "another"))
        after = stack.enter_context(thread("loop"))
        policies = [os.sched_getscheduler(one) for one in (before, mine, theirs, after)]
    assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER]


def loops(connect: Callable[..., Any]) -> tuple[Counter[int], Counter[int]]:
    """Policies of gloo's threads before and after a group of our own."""

    def policies() -> Counter[int]:
        tasks = [one for one in TASKS.iterdir() if (one / "comm").read_text().strip() == "gloo_tcp_loop"]
        return Counter(os.sched_getscheduler(int(one.name)) for one in tasks)

    before = policies()
    with_ours = oktopk.GroupCommunicator.exclusive()
    found = before, policies()
    with_ours.close()
    return found


def test_a_group_of_our_own_has_one_and_leaves_those_of_others_alone() -> None:
    for before, after in worlds.run("gloo", 3, loops):
        assert set(before) == {os.SCHED_OTHER}
        assert after == before + Counter({os.SCHED_BATCH: 1})
