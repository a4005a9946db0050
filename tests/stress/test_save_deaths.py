"""Some of the deaths of `make kills`, and that they are all there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oktopk.train.checkpoint.storage import Checkpoints
from stress.kills.save_deaths import CASES, TIMEOUT, Case, deaths, prepared
from tests.support import worlds
from tests.support.train import saving
from tests.support.train.saving import MODEL

EVERY = 12
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir"}
"""What Python calls the things that Disk stands before, besides fsync and writing to a file."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rank_that_dies_anywhere_in_a_save(tmp_path: Path, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    done = list(deaths(tmp_path, case, EVERY))
    assert len(done) >= 2
    assert not caplog.records  # nothing had to be passed over


def audited(connect: Callable[..., Any], folder: Path) -> set[str]:
    """The kinds of changes that a save makes to the file system, as Python itself reports them."""
    kinds: set[str] = set()

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("os.", "shutil.", "tempfile.")) and event not in ("os.listdir", "os.scandir"):
            kinds.add(event)

    comm = connect(timeout=TIMEOUT)
    sys.addaudithook(hear)
    Checkpoints(folder, MODEL, keep=1).save(comm, saving.made(20, comm.rank))
    return kinds


def test_nothing_is_done_to_the_disk_that_the_test_above_does_not_see(tmp_path: Path) -> None:
    first, second = worlds.run("gloo", 2, audited, prepared(tmp_path / "checkpoints", 2))
    assert first == CHANGES
    assert second <= {"os.rename", "os.remove", "os.mkdir"}
