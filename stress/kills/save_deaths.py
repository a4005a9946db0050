"""A rank dies at any point of a save: the others end, and all ranks load the old checkpoint or the new one.

python -m stress.kills.save_deaths          # make kills, which goes on with run.py
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from oktopk.comm import gather_json
from oktopk.errors import CommError
from oktopk.tools.tables import format_table
from oktopk.train.checkpoint.storage import Checkpoints
from stress.lines import keep_line, kept_lines
from tests.support import worlds
from tests.support.train import saving
from tests.support.train.saving import MODEL, Crash, Disk, assert_made

OLD, LATER, TIMEOUT = 10, 30, 60.0


@dataclass(frozen=True)
class Case:
    """Which step is saved after step OLD, by how many ranks."""

    name: str
    step: int
    world: int


CASES = (Case("next", 20, 3), Case("same step again", OLD, 2))


@dataclass(frozen=True)
class Death:
    """Who has died before or in which of the things that a save does to the disk, and what was loaded then."""

    victim: int
    at: int
    resumed: str


def save_and_die(connect: Callable[..., Any], folder: Path, step: int, victim: int, at: float) -> int:
    """How many things this rank does to the disk in a save. The victim is gone before the n-th of them, or in
    the middle of it, if it is a write."""
    comm, count = connect(timeout=TIMEOUT), 0
    gather_json(comm, None, "ready")  # nobody dies while others are still on their way

    def before(operation: str, path: Path | None) -> None:
        nonlocal count
        count += 1
        if comm.rank == victim and count >= at:
            if operation == "write" and count == at:
                raise Crash  # half of it is written then, and whatever comes next ends the process
            os._exit(1)

    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, before)
        Checkpoints(folder, MODEL, keep=1).save(comm, saving.made(step, comm.rank, mark=1))
    return count


def prepared(folder: Path, world: int) -> Path:
    saving.save(folder, OLD, world)
    saving.where(folder, 5).mkdir()  # left by an earlier crash
    return folder


def assert_resumes(folder: Path, step: int, world: int) -> str:
    """From the old or the new one, on all ranks; and then it goes on."""
    loaded = saving.load(folder, world)
    said = str(loaded[0].shared["said"])
    assert said in (f"step {OLD}, mark 0", f"step {step}, mark 1")
    assert_made(loaded, loaded[0].step, mark=int(said[-1]))
    saving.save(folder, LATER, world, keep=1)
    saving.assert_loads(folder, LATER, world)
    assert os.listdir(folder) == [saving.where(folder, LATER).name]
    return said


def deaths(
    folder: Path, case: Case, every: int = 1, known: Container[tuple[int, int]] = frozenset()
) -> Iterator[Death]:
    """At each point of a save, on each rank; or only at every n-th, for those with less time.

    Points that are known already are left out, by their rank and number.
    """
    step, world = case.step, case.world
    start = prepared(folder / "start", world)
    whole = shutil.copytree(start, folder / "whole")
    counts = worlds.run("gloo", world, save_and_die, whole, step, 0, math.inf)
    assert counts[0] > max(counts[1:])  # rank 0 does the most
    assert assert_resumes(whole, step, world) == f"step {step}, mark 1"
    points = [(victim, at) for victim, count in enumerate(counts) for at in range(1, count + 1)]
    for victim, at in (point for point in points[::-every] if point not in known):
        place = shutil.copytree(start, folder / f"{victim}-{at}")
        with worlds.start("gloo", world, save_and_die, place, step, victim, at) as ranks:
            assert ranks.running(range(world), 2 * TIMEOUT) == []
            assert ranks.outcome(victim).trace == "ended without a report"
            others = [ranks.outcome(rank) for rank in range(world) if rank != victim]
        assert all(other.error is None or isinstance(other.error, CommError) for other in others), others
        yield Death(victim, at, assert_resumes(place, step, world))


def main() -> int:
    """Each problem is an AssertionError."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        help="a file of JSON lines for the results as they come; the same command goes on with it",
    )
    out = parser.parse_args().out
    kept, rows = kept_lines(out), []
    for case in CASES:
        done = [Death(**line["death"]) for line in kept if line["case"] == case.name]
        known = {(one.victim, one.at) for one in done}
        with tempfile.TemporaryDirectory(prefix="oktopk-deaths-") as name:
            for one in tqdm(deaths(Path(name), case, known=known), unit="death", initial=len(done), disable=None):
                done.append(one)
                keep_line(out, {"case": case.name, "death": asdict(one)})
        new = sum(one.resumed.endswith("mark 1") for one in done)
        assert 0 < new < len(done)
        rows.append([case.name, case.world, len(done), len(done), new, len(done) - new])
    print(format_table(["save of", "ranks", "died", "resumed", "from the new one", "from the old one"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
