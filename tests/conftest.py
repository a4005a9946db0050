"""Set up once per session: the hypothesis profile, one torch thread, and kernels that are compiled already.

Also what `make` asks of the suite: the markers `quick` and `property`, and the order. For its end see endings.py.
"""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, seed, settings

from oktopk.tools.lab import cleanup, lab_problem
from tests.support.endings import begin, pytest_terminal_summary, pytest_unconfigure  # noqa: F401
from tests.support.forked import forked_ranks  # noqa: F401  a fixture
from tests.support.kernels.warming import call_every_kernel
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reverse", action="store_true", help="run the tests in the reverse of their usual order")
    parser.addoption("--seeds", type=int, metavar="N", help="run each property test with N hypothesis seeds")


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
    """Files that may take longest begin first: no worker is left alone with one at the end.

    By their timeouts, and then those that start processes.
    """
    limits: dict[Path, tuple[float, bool]] = {}
    for item in items:
        marker, module = item.get_closest_marker("timeout"), getattr(item, "module", None)
        starts = hasattr(module, "worlds") or hasattr(module, "subprocess")
        limit = (marker.args[0] if marker else 0.0, starts)
        limits[item.path] = max(limits.get(item.path, limit), limit)
    items.sort(key=lambda item: limits[item.path], reverse=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `-m quick` or `-m property` would only deselect need not be imported."""
    chosen, path = config.option.markexpr, collection_path.relative_to(config.rootpath).as_posix()
    if not path.endswith(".py") or path.endswith(("__init__.py", "conftest.py")):
        return None
    elsewhere = chosen == "quick" and not QUICK.match(path)
    return elsewhere or (chosen == "property" and "hypothesis" not in collection_path.read_text()) or None


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A property test with several seeds; what it prints when it fails ends with the last one."""
    count = pyfuncitem.config.getoption("--seeds")
    if count is None or pyfuncitem.get_closest_marker("property") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for number in range(count):
        print(f"--hypothesis-seed={number}")
        seed(number)(pyfuncitem.obj)(**arguments)
    return True


def pytest_collection_finish() -> None:
    """Nothing that is there by now goes away: tests that call the collector need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    begin(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Call every kernel on tiny input, so that no test pays for the compiler out of its own timeout.

    Before xdist starts its workers, which find what has been compiled here.
    """
    if not session.config.option.collectonly:
        call_every_kernel()


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
