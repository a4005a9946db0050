"""The power fails at any moment of a save: the disk has the old checkpoint or the new one, whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from oktopk.comm import run_threads
from oktopk.train.checkpoint.storage import Checkpoints
from oktopk.train.run_folder import RunFolder
from tests.support.train import saving
from tests.support.train.power import (
    Choice,
    Cut,
    LossyDisk,
    by_chance,
    content_without_names,
    names_without_content,
    nothing_newer,
)
from tests.support.train.saving import MODEL, assert_made

PLACE = Path("runs") / "one"
FIRST, SECOND, AGAIN = "step 10, mark 0", "step 20, mark 0", "step 20, mark 1"
ALLOWED = {
    "begin": {None},
    "save 10": {None, FIRST},
    "saved 10": {FIRST},
    "save 20": {FIRST, SECOND},
    "saved 20": {SECOND},
    "save 20 again": {SECOND, AGAIN},
    "saved 20 again": {AGAIN},
}
"""What may be found by phase; what was saved before the power cut must be."""
EXTREMES: list[Choice] = [nothing_newer, names_without_content, content_without_names]
CHANCES: list[Choice] = [by_chance(Random(seed)) for seed in range(3)]


def cuts(root: Path, world: int) -> list[Cut]:
    """Of three saves in a run of its own, which keeps one checkpoint."""
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = LossyDisk(root, patch)
        disk.pause("begin")
        RunFolder(root / PLACE, True).close()
        checkpoints = root / PLACE / "checkpoints"
        for step, mark, name in ((10, 0, "10"), (20, 0, "20"), (20, 1, "20 again")):
            disk.pause(f"save {name}")
            saving.save(checkpoints, step, world, mark, keep=1)
            disk.pause(f"saved {name}")
        disk.close()
    return disk.cuts


def found(folder: Path, world: int) -> str | None:
    checkpoints = folder / PLACE / "checkpoints"
    steps = run_threads(world, lambda comm: Checkpoints(checkpoints, MODEL).newest(comm))
    if steps[0] is None:
        return None
    loaded = saving.load(checkpoints, world)
    said = str(loaded[0].shared["said"])
    assert_made(loaded, loaded[0].step, mark=int(said[-1]))
    return said


def aftermaths(root: Path, world: int, choices: list[Choice]) -> Iterator[tuple[str, Path]]:
    """What each power cut leaves, by the phase it has come in."""
    for at, cut in enumerate(cuts(root / "disk", world)):
        for number, choose in enumerate(choices):
            left = root / f"{at}-{number}"
            cut.leave(left, choose)
            yield cut.phase, left


@pytest.mark.parametrize(
    ("world", "choices"), [(1, EXTREMES + CHANCES), (3, EXTREMES)], ids=["alone", "three ranks"]
)
def test_a_power_cut_leaves_the_old_or_the_new(
    tmp_path: Path, world: int, choices: list[Choice], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing has to be passed over: what a manifest names is on the disk before it."""
    seen: dict[str, set[str | None]] = {phase: set() for phase in ALLOWED}
    for phase, folder in aftermaths(tmp_path, world, choices):
        said = found(folder, world)
        assert said in ALLOWED[phase], (phase, folder.name)
        assert not caplog.records, (phase, folder.name)
        seen[phase].add(said)
    assert seen == ALLOWED
