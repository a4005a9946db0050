"""The folder of a cell: its spec, its curve and steps as they come, and its result.

OUT/cells/NAME/
    spec.json        what the cell does; another spec in the same folder is refused
    curve.jsonl      one line per validation: step, clock, bytes so far, metrics, training loss
    steps.csv        one line per step: phase, seconds of the slowest rank, bytes sent per rank
    result.json      written last: the cell is finished
    progress.json    what the cell is doing, for the terminal
    error.txt        how it failed
    checkpoints/     of a long cell that is not finished
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from oktopk.utils.files import write_atomically

from .spec import Race, RaceError, Spec, race_difference

CELLS = "cells"
COMPILING = "compiling kernels"
"""What a cell says it is doing then."""
T = TypeVar("T")
_SPEC, _CURVE, _STEPS, _RESULT = "spec.json", "curve.jsonl", "steps.csv", "result.json"
_PROGRESS, _ERROR, _CHECKPOINTS = "progress.json", "error.txt", "checkpoints"


@dataclass(frozen=True)
class Step:
    """One step; `step` counts from 1."""

    step: int
    phase: str
    seconds: float
    """Of the slowest rank."""
    sent_bytes: float
    """Of a rank, on average."""


@dataclass(frozen=True)
class Point:
    """One validation, after `step` steps."""

    step: int
    seconds: float
    """On the clock."""
    sent_bytes: float
    """By a rank so far, on average."""
    metrics: Mapping[str, float | None]
    loss: float | None = None
    """The mean training loss since the validation before."""


@dataclass(frozen=True)
class Finished:
    """A finished cell, as its folder has it."""

    spec: Spec
    result: Mapping[str, Any]
    curve: Sequence[Point]
    steps: Sequence[Step]


class CellFolder:
    """Reads and writes the folder of one cell; only rank 0 writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[TextIO] = []

    @property
    def checkpoints(self) -> Path:
        return self.path / _CHECKPOINTS

    # The race.

    def prepare(self, spec: Spec) -> bool:
        """Whether the cell is finished; if not, make its folder ready to start or to resume.

        Raises:
            RaceError: the folder holds something else.
        """
        self._check(spec)
        if (self.path / _RESULT).exists():
            self.read()
            return True
        write_atomically(self.path / _SPEC, spec.to_json().encode())
        (self.path / _ERROR).unlink(missing_ok=True)
        (self.path / _PROGRESS).unlink(missing_ok=True)
        return False

    def _check(self, spec: Spec) -> None:
        """Raise a RaceError if the folder holds another cell."""
        if not (self.path / _SPEC).exists():
            if (self.path / _RESULT).exists():
                raise RaceError(f"{self.path} has a result but no {_SPEC}: remove it, or choose another --out")
            return
        found = self.spec()
        if found.cell != spec.cell:
            raise RaceError(f"{self.path} holds another cell ({found.cell}): remove it, or choose another --out")

    def spec(self) -> Spec:
        return self._explain(_SPEC, Spec.from_json)

    def fail(self, message: str) -> None:
        """Keep the error of a failed cell."""
        write_atomically(self.path / _ERROR, (message.rstrip() + "\n").encode("utf-8", "replace"))

    def progress(self) -> dict[str, Any] | None:
        """What the cell is doing; None before it says so."""
        try:
            known = json.loads((self.path / _PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # not there yet
            return None
        return known if isinstance(known, dict) else None

    def read(self) -> Finished:
        """Read a finished cell."""
        result = self._explain(_RESULT, json.loads)
        if not isinstance(result, dict):
            raise RaceError(f"{self.path / _RESULT} is not a result: remove {self.path} to repeat the cell")
        return Finished(self.spec(), result, self._read_curve(), self._read_steps())

    def _read_curve(self) -> list[Point]:
        return self._explain(_CURVE, lambda text: [Point(**json.loads(line)) for line in text.splitlines()])

    def _read_steps(self) -> list[Step]:
        def parse(text: str) -> list[Step]:
            rows = csv.DictReader(io.StringIO(text))
            return [
                Step(int(row["step"]), row["phase"], float(row["seconds"]), float(row["sent_bytes"]))
                for row in rows
            ]

        return self._explain(_STEPS, parse)

    def _explain(self, name: str, parse: Callable[[str], T]) -> T:
        try:
            return parse((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise RaceError(
                f"{self.path / name} cannot be read ({error}): remove {self.path} to repeat the cell"
            ) from error

    # The job.

    def open(self, done: int) -> None:
        """Start the files of curve and steps, or continue them after step `done`."""
        if done:
            curve = [point for point in self._read_curve() if point.step <= done]
            steps = [step for step in self._read_steps() if step.step <= done]
        else:
            curve, steps = [], []
        write_atomically(self.path / _CURVE, "".join(map(_curve_line, curve)).encode())
        write_atomically(self.path / _STEPS, _csv([[item.name for item in fields(Step)], *map(astuple, steps)]))
        self._files = [open(self.path / name, "a", encoding="utf-8") for name in (_CURVE, _STEPS)]  # noqa: SIM115

    def add_step(self, step: Step) -> None:
        self._files[1].write(_csv([astuple(step)]).decode())

    def add_point(self, point: Point) -> None:
        self._files[0].write(_curve_line(point))
        self.flush()

    def flush(self) -> None:
        """Let curve and steps survive what comes: a checkpoint must not be ahead of them."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def say(self, **doing: Any) -> None:
        """Say what the cell is doing."""
        draft = self.path / f".{_PROGRESS}"
        draft.write_text(json.dumps(doing), encoding="utf-8")
        os.replace(draft, self.path / _PROGRESS)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, and remove what only an unfinished cell needs."""
        self.close()
        write_atomically(self.path / _RESULT, (json.dumps(result, indent=2) + "\n").encode())
        (self.path / _PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def _curve_line(point: Point) -> str:
    known = asdict(point)
    known["metrics"] = {name: finite(value) for name, value in known["metrics"].items()}
    return json.dumps({**known, "loss": finite(known["loss"])}) + "\n"


def finite(value: float | None) -> float | None:
    """The number if it is finite, as JSON has no others."""
    return value if value is not None and math.isfinite(value) else None


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def find_finished(out: Path) -> tuple[list[Finished], list[str]]:
    """All finished cells below a race's folder, sorted by name, and what is wrong with those that are damaged."""
    cells, problems = [], []
    for path in _folders(out):
        if (path / _RESULT).exists():
            try:
                cells.append(CellFolder(path).read())
            except RaceError as error:
                problems.append(str(error))
    return cells, problems


def _folders(out: Path) -> list[Path]:
    return sorted((out / CELLS).iterdir()) if (out / CELLS).is_dir() else []


def check_race(out: Path, race: Race) -> None:
    """Raise a RaceError if the folder holds cells of another race."""
    for path in _folders(out):
        if (path / _SPEC).exists() and (difference := race_difference(race, CellFolder(path).spec().race)):
            raise RaceError(
                f"{out} holds another race: {difference} ({path.name}). Cells of different races cannot be "
                "compared: pass the same options, or another --out"
            )
