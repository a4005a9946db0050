"""Set up once per session: the hypothesis profile, one torch thread, and kernels that are compiled already.

Also what `make` asks of the suite: the markers `quick` and `property`, the order, and a last word on skips.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from oktopk.kernels import backend
from oktopk.tools.lab import cleanup, lab_problem
from oktopk.wire import message as wire
from oktopk.wire.sparse_vector import SparseVector
from tests.support.labs import machine_interfaces, spaces_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels then run on the CPU

collect_ignore = ["support/jobs/torch_ddp.py"]  # imports tests of torch, with warnings of their own
if not find_spec("triton"):  # no build for this platform
    collect_ignore += ["contracts/test_triton.py"]

settings.register_profile(
    "oktopk",
    deadline=None,  # a busy machine is not a bug
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
    database=None,  # what a run finds does not depend on the runs before it
    max_examples=60,
)
settings.register_profile("quick", settings.get_profile("oktopk"), max_examples=12)
settings.load_profile("oktopk")

QUICK = re.compile(
    r"src/|tests/(test_collective|(laws|contracts|algorithms|feedback|wire|metrics|utils|engine|train/config)/"
    r"|comm/test_(agreement|control|mpi_waiting)|train/data/test_(augment|labels|manifest|plan|shard)"
    r"|train/test_(models|screen)|tools/(bench|report|simulate)/test_(figures|plan|replay|timing))"
)
"""Laws, contracts and units: the tests that `make quick` runs, but for those that are marked `processes`."""
LAST_WORD = "last word"
"""A property of a test: a line for the end of the run."""
RUN = "OKTOPK_TEST_RUN"
"""In the environment of all processes that this run starts."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reverse", action="store_true", help="run the tests in the reverse of their usual order")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Markers are there before -m chooses by them, and the order is set when all others have had their say."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
        if QUICK.match(item.nodeid) and item.get_closest_marker("processes") is None:
            item.add_marker("quick")
    yield
    _begin_with_the_longest(items)
    if config.getoption("--reverse"):
        items.reverse()


def _begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Files that may take longest, by their timeouts, begin first: no worker is left alone with one at the end."""
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), marker.args[0] if marker else 0.0)
    items.sort(key=lambda item: -limits[item.path])


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


def pytest_configure(config: pytest.Config) -> None:
    # Background shells and nohup let their children ignore these, and children pass that on to theirs.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        os.environ[RUN] = str(os.getpid())


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
                found[int(path.name)] = command.decode("utf-8", "replace")
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    """Call every kernel on tiny input, so that no test pays for the compiler out of its own timeout.

    Before xdist starts its workers, which find what has been compiled here.
    """
    if not session.config.option.collectonly:
        _compile_kernels()


def _compile_kernels() -> None:
    torch.set_num_threads(1)
    x = torch.ones(33)
    kernels = backend(x)
    kernels.select(x, math.inf, 0)
    for keep_old in (False, True):
        kernels.accumulate_select(x.clone(), x.clone(), math.inf, 0, keep_old)
    kernels.accumulate_select_pieces([x.clone()], [x.clone()], math.inf, 0)
    kernels.first_equal(x, 1.0, 1)
    kernels.kth_magnitude(x, 1)
    kernels.kth_magnitude(torch.ones(2**20 - 1), 1)
    kernels.magnitude_histogram(x, 0, 1)
    kernels.magnitude_moments(x)
    for dtype, size in ((torch.int32, 64), (torch.int64, 2**31)):
        vector = SparseVector(torch.arange(3, dtype=dtype), torch.ones(3), size)
        vector.at_least(1.0)
        kernels.scatter_add_(x.clone(), vector.indices, vector.values)
        kernels.assign_(x.clone(), vector.indices, vector.values)
        kernels.scatter_add_pieces_([x.clone()], vector.indices, vector.values)
        kernels.assign_pieces_([x.clone()], vector.indices, vector.values)
        kernels.union_sum([(vector.indices, vector.values)], 0, 33)
        kernels.common(vector.indices, vector.values, vector.indices)
        tag = wire.Tag(0, 0, 0, 0, size, 0, size)
        wire.decode(wire.encode(vector, tag, wire.ValueCode.FP16)[0], tag)


# Tests of the lab are skipped where there can be none, and leave nothing behind.


@pytest.fixture(scope="module")
def buildable() -> None:
    if problem := lab_problem():
        pytest.skip(problem)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Every test of the lab leaves the machine as it was."""
    before = machine_interfaces()
    yield
    assert spaces_of(os.getpid()) == []
    assert machine_interfaces() == before
    assert cleanup._on_signal not in map(signal.getsignal, signal.valid_signals())
