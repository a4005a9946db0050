"""How a run of tests begins and ends: signals, processes that tests have left, and a last word on skips.

A conftest.py calls begin() in its pytest_configure, and imports the two hooks.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

LAST_WORD = "last word"
"""A property of a test: a line for the end of the run."""
RUN = "OKTOPK_TEST_RUN"
"""In the environment of all processes that this run starts."""


def begin(config: pytest.Config) -> None:
    """Take the usual signals, and mark what this run will start."""
    # Background shells and nohup let their children ignore these, and children pass that on to theirs.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        os.environ[RUN] = str(os.getpid())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped, for which reasons; and what tests have to say when all is done."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in skipped)
    said = "".join(f"; {reason} ({count})" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"{len(skipped)} skipped{said.replace(';', ':', 1)}")
    for report in terminalreporter.stats.get("passed", ()):
        for name, line in report.user_properties:
            if name == LAST_WORD:
                terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what is left of this run, as after a test that has taken too long, and name it."""
    if hasattr(config, "workerinput") or os.environ.get(RUN) != str(os.getpid()):
        return
    end = time.monotonic() + 10  # those who are about to end by themselves may do so
    while (left := _left()) and time.monotonic() < end:
        time.sleep(0.05)
    for pid, command in left.items():
        print(f"left by a test, ended now: {pid} {command}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _left() -> dict[int, str]:
    mark, found = f"{RUN}={os.getpid()}".encode(), {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # has ended, or is somebody else's
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"from multiprocessing." in command:
                    continue  # servers of this process, which end with it
                found[int(path.name)] = command.decode("utf-8", "replace")
    return found
