"""The folder of a run, finished or being written, as records.

Whatever a file lacks is left out and noted. Of two lines for the same step, the later one counts: a run that goes
on from a checkpoint repeats steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oktopk.errors import OkTopkError
from oktopk.metrics.events import DENSE, SPARSE

from .reading import Row, amount, is_own, json_file, number, numbers, rows, sizes, text, text_file, whole

CONFIG, PLAN, RESULT, METRICS, SWEEP = "config.toml", "plan.json", "result.json", "metrics.jsonl", "sweep.json"
FILES = (CONFIG, PLAN, RESULT, METRICS)
MOST_RUNS = 60


class ReportError(OkTopkError, ValueError):
    """There is nothing to report on."""


@dataclass(frozen=True)
class Moved:
    """What one kind of operation sent in one step."""

    operation: str
    stage: str
    control: bool
    modelled: bool
    bytes: float
    messages: float
    seconds: float
    sizes: Mapping[int, int]


@dataclass(frozen=True)
class Reduction:
    """A bucket in a step."""

    bucket: int
    phase: str
    algorithm: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """`numbers` are what the reducer says of the step, `train` what the training loop says."""

    number: int
    phase: str = ""
    skipped: bool = False
    culprits: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    reductions: tuple[Reduction, ...] = ()
    traffic: tuple[Moved, ...] | None = None


@dataclass(frozen=True)
class Epoch:
    steps_by_phase: Mapping[str, float]
    sent_bytes: Mapping[str, Sequence[float]]
    """For each phase, the mean of a step, rank by rank."""


@dataclass(frozen=True)
class Validation:
    step: int
    epoch: int | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    name: str
    steps: tuple[Step, ...]
    epochs: tuple[Epoch, ...]
    validations: tuple[Validation, ...]
    plan: Row
    result: Row
    config: str
    notes: tuple[str, ...]

    def said(self, name: str) -> str | float | None:
        """A fact of the run, from where it is known."""
        for known in (self.result, self.plan):
            value = known.get(name)
            found = text(value) if isinstance(value, str) else number(value)
            if found not in (None, ""):
                return found
        return None

    @property
    def algorithm(self) -> str:
        told = (
            part.algorithm for step in reversed(self.steps) for part in step.reductions if part.phase == SPARSE
        )
        return str(self.said("algorithm") or next(told, DENSE if self.steps else "unknown"))

    @property
    def world(self) -> int | None:
        """P, the number of ranks."""
        said = self.said("world")
        if isinstance(said, float) and said >= 1:
            return int(said)
        return max((len(ranks) for epoch in self.epochs for ranks in epoch.sent_bytes.values()), default=None)


def find(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs; one that a sweep has made stands for all of its runs."""
    found = [folder for path in paths for folder in _runs_in(path)]
    unique = list(dict.fromkeys(folder.resolve() for folder in found))
    if len(unique) > MOST_RUNS:
        raise ReportError(f"{len(unique)} runs are too many for a page: give at most {MOST_RUNS}")
    return unique


def _runs_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ReportError(f"{path} is no folder: give the folder of a run, or of a sweep")
    if _is_run(path):
        return [path]
    inside = sorted(child for child in path.iterdir() if _is_below(child, path) and _is_run(child))
    if not inside:
        raise ReportError(f"there is no run in {path}: neither it nor a folder in it has a {CONFIG} or {METRICS}")
    order = {name: place for place, name in enumerate(_order(path / SWEEP))}
    return sorted(inside, key=lambda child: order.get(child.name, len(order)))


def _is_run(path: Path) -> bool:
    return any(is_own(path / name) for name in FILES)


def _is_below(child: Path, folder: Path) -> bool:
    """A link to a folder elsewhere is not of the sweep; who means it gives that folder itself."""
    try:
        return child.is_dir() and child.resolve().is_relative_to(folder.resolve())
    except OSError:  # links in a circle
        return False


def _order(path: Path) -> list[str]:
    """The names of a sweep's runs as it does them."""
    runs = json_file(path, []).get("runs")
    return [text(row.get("run")) for row in runs if isinstance(row, dict)] if isinstance(runs, list) else []


def names(folders: Sequence[Path]) -> list[str]:
    """As short as they can be while all differ.

    >>> names([Path("/a/x"), Path("/b/x")])
    ['a/x', 'b/x']
    """
    for length in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        short = [text("/".join(folder.parts[-length:])) for folder in folders]
        if len(set(short)) == len(short):
            return short
    return [f"{place}: {text(folder.name)}" for place, folder in enumerate(folders)]


def read(folder: Path, name: str) -> Run:
    notes: list[str] = []
    steps, epochs, validations = _sorted_out(rows(folder / METRICS, notes))
    plan, config = json_file(folder / PLAN, notes), text_file(folder / CONFIG, notes)
    result = json_file(folder / RESULT, [])
    if steps and not any(step.traffic is not None for step in steps):
        notes.append("The steps have no traffic by operation: an older version wrote them, or none was metered.")
    if steps and not any(step.train for step in steps):
        notes.append("There are no lines of a training loop: losses, forward and backward are not known.")
    return Run(name, steps, epochs, validations, plan, result, config, tuple(notes))


def _sorted_out(
    lines: Iterator[Row],
) -> tuple[tuple[Step, ...], tuple[Epoch, ...], tuple[Validation, ...]]:
    steps: dict[int, Step] = {}
    epochs: dict[int, Epoch] = {}
    validations: dict[int, Validation] = {}
    pending: list[tuple[int, Reduction]] = []
    for row in lines:
        kind, place = row.get("event"), whole(row, "step")
        if place is None:
            continue
        before = steps.get(place, Step(place))
        if kind == "reduction":
            pending.append((place, _reduction(row)))
        elif kind == "step":
            steps[place] = _step(place, row, tuple(part for of, part in pending if of == place), before)
            pending.clear()
        elif kind == "train":
            phase, skipped = before.phase or text(row.get("phase")), before.skipped or row.get("skipped") is True
            steps[place] = replace(before, phase=phase, skipped=skipped, train=numbers(row))
        elif kind == "epoch":
            epochs[place] = _epoch(row)
        elif kind == "validation":
            figures = {key: value for key, value in numbers(row).items() if key not in ("step", "epoch")}
            validations[place] = Validation(place, whole(row, "epoch"), figures)
    return (
        tuple(steps[place] for place in sorted(steps)),
        tuple(epochs[place] for place in sorted(epochs)),
        tuple(validations[place] for place in sorted(validations)),
    )


def _reduction(row: Row) -> Reduction:
    return Reduction(whole(row, "bucket") or 0, text(row.get("phase")), text(row.get("algorithm")), numbers(row))


def _step(place: int, row: Row, reductions: tuple[Reduction, ...], before: Step) -> Step:
    traffic = row.get("traffic")
    moved = (
        tuple(_moved(part) for part in traffic if isinstance(part, dict)) if isinstance(traffic, list) else None
    )
    phase, culprits = text(row.get("phase")), text(row.get("culprits"))
    skipped = row.get("skipped") is True
    return Step(place, phase, skipped, culprits, numbers(row), before.train, reductions, moved)


def _moved(row: Row) -> Moved:
    return Moved(
        operation=text(row.get("operation")) or "unnamed",
        stage=text(row.get("stage")) or "unnamed",
        control=row.get("control") is True,
        modelled=row.get("modelled") is True,
        bytes=amount(row, "sent_bytes"),
        messages=amount(row, "sent_messages"),
        seconds=amount(row, "seconds"),
        sizes=sizes(row.get("sizes")),
    )


def _epoch(row: Row) -> Epoch:
    sent, phases = row.get("sent_bytes"), row.get("phases")
    by_rank = {
        phase: [number(value) or 0.0 for value in sent[phase]]
        for phase in (DENSE, SPARSE)
        if isinstance(sent, dict) and isinstance(sent.get(phase), list)
    }
    steps = {
        phase: amount(phases[phase], "steps")
        for phase in by_rank
        if isinstance(phases, dict) and isinstance(phases.get(phase), dict)
    }
    return Epoch(steps, by_rank)


def state(folders: Iterable[Path]) -> str:
    """Changes when a file of a run does."""
    seen = []
    for path in (folder / name for folder in folders for name in FILES):
        try:
            about = path.stat()
            seen.append([about.st_mtime_ns, about.st_size])
        except OSError:
            seen.append([])
    return json.dumps(seen)
