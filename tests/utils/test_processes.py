"""Processes that are started together: signals reach all of them, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from oktopk.utils.processes import Process, local_world, start_processes

pytestmark = pytest.mark.processes
SLEEPS = [sys.executable, "-c", "import time; time.sleep(300)"]
PATIENCE = 100


def test_a_signal_reaches_a_process_that_is_just_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = subprocess.Popen, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        process = real(*arguments, **options)
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with start_processes(SLEEPS, [Process()] * 3) as (processes, came):
        assert [process.wait(PATIENCE) for process in processes] == [-signal.SIGTERM] * 3
    assert came == [signal.SIGTERM]


def test_none_is_left_when_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), start_processes(SLEEPS, [Process()] * 3) as (processes, _):
        raise ZeroDivisionError
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3


def test_each_has_streams_and_an_environment_of_its_own() -> None:
    says = [sys.executable, "-c", "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"]
    with (
        local_world(3) as world,
        start_processes(says, [Process(rank, subprocess.PIPE) for rank in world]) as (processes, came),
    ):
        said = [process.communicate(timeout=PATIENCE)[0].decode() for process in processes]
    assert said == ["0 3\n", "1 3\n", "2 3\n"]
    assert came == []
