"""Whoever makes states and reducers and closes them, again and again, is left with nothing of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import worlds
from tests.support.training import with_hook, with_loop, with_wrapper

FIRST, MORE = 3, 6
FRONT_ENDS = {"hook": with_hook, "wrapper": with_wrapper, "loop": with_loop}


def held() -> tuple[int, int, int]:
    """Open files, threads (also those of libraries), and Python objects."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(gc.get_objects())


def no_more(later: tuple[int, int, int], first: tuple[int, int, int]) -> bool:
    return later[0] <= first[0] and later[1] <= first[1] and later[2] <= first[2] + 50


def again_and_again(connect: Callable[..., Any], front_end: str) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for times in (FIRST, MORE):
        for _ in range(times):
            FRONT_ENDS[front_end]("model", 4, warmup_steps=1, density=0.05, auto=False, timeout=60.0)
        found.append(held())
    worlds.wait_until(lambda: no_more(held(), found[0]), 20)  # threads may outlast their join by a moment
    found[-1] = held()
    return found


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_what_is_closed_leaves_nothing(front_end: str) -> None:
    for first, later in worlds.run("gloo", 3, again_and_again, front_end):
        assert no_more(later, first), (first, later)
