"""What is promised of a run whose number of ranks has changed on the way, with figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stress.elastic.job import SAVE_EVERY, Course

ROUNDING = 2.0**-23
"""Of fp32, relative."""
CURVE, FINAL = 0.25, 0.03
"""How far means over ten steps, and the loss at the end, may be from the undisturbed run's."""


@dataclass(frozen=True)
class Run:
    """One that was disturbed, its folder, and what its ranks have noted."""

    course: Course
    folder: Path
    notes: Path


@dataclass(frozen=True)
class Law:
    promise: str
    holds: bool
    figure: str


def laws(run: Run) -> list[Law]:
    return [steps(run), metrics(run), mass(run), parameters(run)]


def comparisons(run: Run, undisturbed: Path) -> list[Law]:
    """With the folder of a run of as many ranks all the time."""
    return [curve(run.folder, undisturbed), final(run.folder, undisturbed)]


def steps(run: Run) -> Law:
    course = run.course
    expected = [
        (course.ranks, range(course.kill_at)),
        (course.ranks - 1, range(course.resumed_at, course.rejoined_at)),
        (course.ranks, range(course.rejoined_at, course.steps)),
    ]
    found = lives(run)
    holds = found == [(world, list(done)) for world, done in expected]
    figure = ", ".join(f"{done[0]}–{done[-1]} on {world} ranks" for world, done in found)
    return Law("no step is lost, at most those since a checkpoint are repeated", holds, figure)


def lives(run: Run) -> list[tuple[int, list[int]]]:
    """The number of ranks and the steps of each life, which all its ranks have done, in order."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for note in run.notes.glob("steps-*"):
        lines = [tuple(map(int, line.split())) for line in note.read_text().splitlines()]
        world, first = lines[0][0], lines[0][2]
        found.setdefault((first, world), set()).add(tuple(step for _, _, step in lines))
    assert all(len(done) == 1 for done in found.values()), found
    return [(world, list(done.pop())) for (_, world), done in sorted(found.items())]


def metrics(run: Run) -> Law:
    written = [row["step"] for row in rows(run.folder, "train")]
    holds = written == list(range(run.course.steps))
    return Law("metrics.jsonl has each step once", holds, f"{len(written)} steps")


def mass(run: Run) -> Law:
    """Elements that are zero or close to it are held against the largest."""
    worst = 0.0
    for step, before, after in changes(run.course):
        old = [own["oktopk"]["residuals"] for own in saved(run, step)]
        now = [one["residuals"] for one in resumed(run, step, after)]
        assert (len(old), len(now)) == (before, after)
        was, has = kept_back(old), kept_back(now)
        assert was.count_nonzero() > 0.9 * len(was)
        worst = max(worst, float(((has - was).abs() / was.abs().clamp_min(1e-6 * was.abs().max())).max()))
    figure = f"{worst:.1e} off at most, relative"
    return Law("residual mass is conserved: Σe'/P' = Σe/P", worst <= ROUNDING, figure)


def changes(course: Course) -> list[tuple[int, int, int]]:
    """At which step there were how many ranks before and after."""
    return [
        (course.resumed_at, course.ranks, course.ranks - 1),
        (course.rejoined_at, course.ranks - 1, course.ranks),
    ]


def kept_back(residuals: Sequence[dict[str, Tensor]]) -> Tensor:
    """Of the average gradient: Σe/P, of all parameters."""
    ranks = [torch.cat([kept[name].flatten() for name in sorted(kept)]) for kept in residuals]
    return torch.stack(ranks).double().sum(0) / len(ranks)


def parameters(run: Run) -> Law:
    different = 0
    for step, _, after in changes(run.course):
        shared = torch.load(checkpoint(run, step) / "shared.pt", weights_only=True)["parameters"]
        now = resumed(run, step, after)
        assert len(now) == after
        different += sum(not torch.equal(one["parameters"][name], shared[name]) for one in now for name in shared)
    return Law("all ranks resume with the parameters that were saved", different == 0, f"{different} differ")


def curve(disturbed: Path, undisturbed: Path) -> Law:
    now, other = (means([row["loss"] for row in rows(run, "train")]) for run in (disturbed, undisturbed))
    apart = max(abs(a / b - 1) for a, b in zip(now, other, strict=True))
    learned = now[0] > 3 * now[-1]
    figure = f"means over {SAVE_EVERY} steps {apart:.1%} apart at most, from {now[0]:.3f} to {now[-1]:.3f}"
    return Law("the loss goes on as if nothing had happened", learned and apart <= CURVE, figure)


def means(curve: Sequence[float]) -> list[float]:
    return [sum(curve[i : i + SAVE_EVERY]) / SAVE_EVERY for i in range(0, len(curve), SAVE_EVERY)]


def final(disturbed: Path, undisturbed: Path) -> Law:
    end, other = (rows(run, "validation")[-1]["val loss"] for run in (disturbed, undisturbed))
    figure = f"{end:.4f} against {other:.4f}: {end / other - 1:+.2%}"
    return Law("the final loss is that of the undisturbed run", abs(end / other - 1) <= FINAL, figure)


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    every = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in every if row["event"] == event]


def checkpoint(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:08d}"


def saved(run: Run, step: int) -> list[dict[str, Any]]:
    """What each rank had saved of its own."""
    return [torch.load(file, weights_only=True) for file in sorted(checkpoint(run, step).glob("rank-*.pt"))]


def resumed(run: Run, step: int, world: int) -> list[dict[str, Any]]:
    """What each of so many ranks had after it had resumed; the last time, if they had to start twice."""
    newest: dict[int, dict[str, Any]] = {}
    for file in sorted(run.notes.glob("resumed-*.pt"), key=lambda file: file.stat().st_mtime_ns):
        note = torch.load(file, weights_only=True)
        if (note["step"], note["world"]) == (step, world):
            newest[note["rank"]] = note
    return list(newest.values())
