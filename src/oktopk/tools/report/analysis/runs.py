"""Read the folder of a run, finished or running, into records.

Missing values are left out and noted. If two lines describe the same step, the later one counts, because a resumed
run repeats steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oktopk.errors import OkTopkError
from oktopk.metrics.events import DENSE, SPARSE

from .parsing import Row, amount, is_own_file, json_file, number, numbers, rows, sizes, text, text_file, whole

CONFIG, PLAN, RESULT, METRICS, SWEEP = "config.toml", "plan.json", "result.json", "metrics.jsonl", "sweep.json"
FILES = (CONFIG, PLAN, RESULT, METRICS)
MOST_RUNS = 60


class ReportError(OkTopkError, ValueError):
    """There is no run to report on."""


@dataclass(frozen=True)
class Transfer:
    """The traffic of one kind of operation in one step."""

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
    """The reduction of one bucket in a step."""

    bucket: int
    phase: str
    algorithm: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """One step; `numbers` come from the reducer, `train` from the training loop."""

    number: int
    phase: str = ""
    skipped: bool = False
    culprits: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    reductions: tuple[Reduction, ...] = ()
    traffic: tuple[Transfer, ...] | None = None


@dataclass(frozen=True)
class Epoch:
    steps_by_phase: Mapping[str, float]
    sent_bytes: Mapping[str, Sequence[float]]
    """Mean per step of each rank, by phase."""


@dataclass(frozen=True)
class Validation:
    step: int
    epoch: int | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Decision:
    """What `auto` decided: the way of the steps from `step` on, and what it had measured."""

    step: int
    dense: bool
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
    decisions: tuple[Decision, ...] = ()

    def lookup(self, name: str) -> str | float | None:
        """Look up a value in the result, then in the plan."""
        for known in (self.result, self.plan):
            value = known.get(name)
            found = text(value) if isinstance(value, str) else number(value)
            if found not in (None, ""):
                return found
        return None

    @property
    def algorithm(self) -> str:
        algorithms = (
            part.algorithm for step in reversed(self.steps) for part in step.reductions if part.phase == SPARSE
        )
        return str(self.lookup("algorithm") or next(algorithms, DENSE if self.steps else "unknown"))

    @property
    def world(self) -> int | None:
        """P, the number of ranks."""
        world = self.lookup("world")
        if isinstance(world, float) and world >= 1:
            return int(world)
        return max((len(ranks) for epoch in self.epochs for ranks in epoch.sent_bytes.values()), default=None)


def find_runs(paths: Iterable[Path], most: float = MOST_RUNS) -> list[Path]:
    """Find the run folders, at most so many; the folder of a sweep stands for all of its runs."""
    found = [folder for path in paths for folder in _runs_in(path)]
    unique = list(dict.fromkeys(folder.resolve() for folder in found))
    if len(unique) > most:
        raise ReportError(f"{len(unique)} runs are too many for one page: pass at most {most:g}")
    return unique


def _runs_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: pass the folder of a run or of a sweep")
    if _is_run(path):
        return [path]
    inside = sorted(child for child in path.iterdir() if _is_below(child, path) and _is_run(child))
    if not inside:
        raise ReportError(f"no run in {path}: neither it nor a folder in it has a {CONFIG} or {METRICS}")
    order = {name: place for place, name in enumerate(_order(path / SWEEP))}
    return sorted(inside, key=lambda child: order.get(child.name, len(order)))


def _is_run(path: Path) -> bool:
    return any(is_own_file(path / name) for name in FILES)


def _is_below(child: Path, folder: Path) -> bool:
    """Whether a folder is inside the sweep; a link to a folder elsewhere is not."""
    try:
        return child.is_dir() and child.resolve().is_relative_to(folder.resolve())
    except OSError:  # links in a circle
        return False


def _order(path: Path) -> list[str]:
    """The runs of a sweep, in its order."""
    runs = json_file(path, []).get("runs")
    return [text(row.get("run")) for row in runs if isinstance(row, dict)] if isinstance(runs, list) else []


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Name the runs with the shortest distinct path suffixes.

    >>> name_runs([Path("/a/x"), Path("/b/x")])
    ['a/x', 'b/x']
    """
    for length in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        short = [text("/".join(folder.parts[-length:])) for folder in folders]
        if len(set(short)) == len(short):
            return short
    return [f"{place}: {text(folder.name)}" for place, folder in enumerate(folders)]


def read_run(folder: Path, name: str) -> Run:
    notes: list[str] = []
    steps, epochs, validations, decisions, about = _parse_rows(rows(folder / METRICS, notes))
    own = notes if not about else []  # the loop of a script has no such files, and its metrics say the same
    plan, config = json_file(folder / PLAN, own) or about, text_file(folder / CONFIG, own)
    result = json_file(folder / RESULT, [])
    if steps and not any(step.traffic is not None for step in steps):
        notes.append("The steps have no traffic by operation: written by an older version, or not metered.")
    if steps and not any(step.train for step in steps):
        notes.append("No training loop wrote this: losses, forward and backward times are not known.")
    return Run(name, steps, epochs, validations, plan, result, config, tuple(notes), decisions)


def _parse_rows(
    lines: Iterator[Row],
) -> tuple[tuple[Step, ...], tuple[Epoch, ...], tuple[Validation, ...], tuple[Decision, ...], Row]:
    steps: dict[int, Step] = {}
    epochs: dict[int, Epoch] = {}
    validations: dict[int, Validation] = {}
    decisions: dict[int, Decision] = {}
    about: Row = {}
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
        elif kind == "decision":
            figures = {key: value for key, value in numbers(row).items() if key != "step"}
            decisions[place] = Decision(place + 1, row.get("dense") is True, figures)
        elif kind == "run":
            about = {key: value for key, value in row.items() if key not in ("event", "step")}
        elif kind == "end":
            about = {**about, "finished": True}
    return (
        tuple(steps[place] for place in sorted(steps)),
        tuple(epochs[place] for place in sorted(epochs)),
        tuple(validations[place] for place in sorted(validations)),
        tuple(decisions[place] for place in sorted(decisions)),
        about,
    )


def _reduction(row: Row) -> Reduction:
    return Reduction(whole(row, "bucket") or 0, text(row.get("phase")), text(row.get("algorithm")), numbers(row))


def _step(place: int, row: Row, reductions: tuple[Reduction, ...], before: Step) -> Step:
    traffic = row.get("traffic")
    moved = (
        tuple(_parse_transfer(part) for part in traffic if isinstance(part, dict))
        if isinstance(traffic, list)
        else None
    )
    phase, culprits = text(row.get("phase")), text(row.get("culprits"))
    skipped = row.get("skipped") is True
    return Step(place, phase, skipped, culprits, numbers(row), before.train, reductions, moved)


def _parse_transfer(row: Row) -> Transfer:
    return Transfer(
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


def fingerprint(folders: Iterable[Path]) -> str:
    """A string that changes when a file of a run changes."""
    seen = []
    for path in (folder / name for folder in folders for name in FILES):
        try:
            about = path.stat()
            seen.append([about.st_mtime_ns, about.st_size])
        except OSError:
            seen.append([])
    return json.dumps(seen)
