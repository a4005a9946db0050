"""Run the same training with several algorithms, densities and seeds, one run after the other.

Each run is a process with its own folder inside the sweep's. Starting a sweep again skips finished runs and
resumes the others from their last checkpoint.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oktopk.utils.files import write_atomically
from oktopk.utils.schemas import add_schema
from oktopk.utils.signals import ask_to_end, forward_signals

DENSE = "dense"
CONFIG, RESULT = "config.toml", "result.json"
CSV, MEANS, JSON = "sweep.csv", "sweep_means.csv", "sweep.json"
FINISHED, FAILED, INTERRUPTED, NOT_BEGUN = "finished", "failed", "interrupted", "not begun"
TRAIN = (sys.executable, "-m", "oktopk", "train")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run of the sweep. Dense has no density."""

    algorithm: str
    density: float | str | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}{'' if self.density is None else f'-{self.density}'}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.algorithm}{'' if self.density is None else f' {self.density}'} seed {self.seed}"

    def options(self) -> list[str]:
        density = [] if self.density is None else ["--density", str(self.density)]
        return ["--compressor", self.algorithm, *density, "--seed", str(self.seed)]


@dataclass(frozen=True)
class Outcome:
    """The status of a run so far; `result` is the content of its result.json."""

    run: Run
    status: str = NOT_BEGUN
    problem: str | None = None
    result: dict[str, Any] | None = None


def plan(algorithms: Sequence[str], densities: Sequence[float | str], seeds: Sequence[int]) -> list[Run]:
    """List the runs, seed by seed, so that there is something to compare early. Dense runs once per seed.

    >>> [run.name for run in plan(["dense", "oktopk"], [0.01, 0.02], [7])]
    ['dense-seed7', 'oktopk-0.01-seed7', 'oktopk-0.02-seed7']
    """
    runs = [
        Run(algorithm, density, seed)
        for seed in seeds
        for algorithm in algorithms
        for density in ((None,) if algorithm == DENSE else densities)
    ]
    return list(dict.fromkeys(runs))


def run_all(
    runs: Sequence[Run],
    folder: Path,
    options: Sequence[str] = (),
    command: Sequence[str] = TRAIN,
    on_change: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
) -> tuple[list[Outcome], signal.Signals | None]:
    """Do all runs that are not finished; returns the outcomes, and the signal that ended the sweep, if any.

    on_change() gets the outcomes before and after each run. If a run fails, the next one starts. A signal ends the
    current run, which saves itself, and then the sweep.
    """
    outcomes = [_read_outcome(run, folder / run.name) for run in runs]
    children: list[subprocess.Popen[bytes]] = []
    with forward_signals(children) as came:
        for index, run in enumerate(runs):
            on_change(outcomes)
            if came:
                break
            position = f"{index + 1} of {len(runs)}: {run}"
            if outcomes[index].status in (FINISHED, FAILED):
                log.info("%s: %s", position, outcomes[index].problem or "already finished")
                continue
            log.info("%s", position)
            path = folder / run.name
            code = _run_command([*command, *_arguments(run, path), *options], children, came)
            outcomes[index] = _judge(_read_outcome(run, path), code, stopped=bool(came))
    on_change(outcomes)
    return outcomes, came[-1] if came else None


def _arguments(run: Run, path: Path) -> list[str]:
    resume = ["--resume"] if (path / CONFIG).exists() else []
    return ["--out", str(path), *resume, *run.options()]


def _read_outcome(run: Run, path: Path) -> Outcome:
    """Read the outcome of a run from its folder."""
    try:
        result = json.loads((path / RESULT).read_text(encoding="utf-8"))
        if not _is_result(result):
            raise ValueError("not a result of a run")
    except FileNotFoundError:
        return Outcome(run, INTERRUPTED if (path / CONFIG).exists() else NOT_BEGUN)
    except (OSError, ValueError, RecursionError) as error:
        return Outcome(run, FAILED, f"{path / RESULT} cannot be read ({error}): remove {path} to repeat the run")
    for name in ("algorithm", "seed", *(["density"] if run.density is not None else [])):
        if result.get(name) != getattr(run, name):
            problem = f"{path} holds another run, with {name} {result.get(name)}: remove it to do this run"
            return Outcome(run, FAILED, problem)
    return Outcome(run, FINISHED if result.get("finished") else INTERRUPTED, result=result)


def _is_result(value: Any) -> bool:
    """Whether the value has the form of a result.json, as far as the table needs it."""
    if not isinstance(value, dict):
        return False
    phases, validations = value.get("phases") or {}, value.get("validations") or []
    if not isinstance(phases, dict) or not isinstance(validations, list):
        return False
    rows = [*phases.values(), *validations]
    return all(isinstance(row, dict) and all(map(_is_number, row.values())) for row in rows)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, (int, float))


def _judge(found: Outcome, code: int, stopped: bool) -> Outcome:
    if found.status == FINISHED and code == 0:
        return found
    if stopped:
        return replace(found, status=INTERRUPTED)
    problem = f"ended with code {code}" if code else found.problem or f"left no finished {RESULT}"
    log.error("%s: %s", found.run, problem)
    return replace(found, status=FAILED, problem=problem)


def _run_command(
    command: Sequence[str], children: list[subprocess.Popen[bytes]], came: Sequence[signal.Signals]
) -> int:
    """Run the command and return its exit code. Its log goes to stderr: stdout is for the table only."""
    children[:] = [subprocess.Popen(command, stdout=2, start_new_session=True)]
    for number in came:  # signals that came while the process started
        ask_to_end(children[0], number)
    return children[0].wait()


def make_row(outcome: Outcome) -> dict[str, Any]:
    """Make the row of a run: its last validation, and means over its sparse steps, or its dense steps if it has no
    others."""
    run, result = outcome.run, outcome.result or {}
    phases = result.get("phases") or {}
    phase = next((name for name in ("sparse", "dense") if name in phases), None)
    means = phases.get(phase) or {}
    seconds = means.get("step_seconds")
    return {
        "run": run.name,
        "algorithm": run.algorithm,
        "density": run.density,
        "seed": run.seed,
        "status": outcome.status,
        "problem": outcome.problem,
        "steps": result.get("steps"),
        "phase": phase,
        "sent_bytes": means.get("sent_bytes"),
        "step_ms": None if seconds is None else 1e3 * seconds,
        **_validation(result),
    }


def _validation(result: dict[str, Any]) -> dict[str, float]:
    last = (result.get("validations") or [{}])[-1]
    return {name: value for name, value in last.items() if name not in ("epoch", "step")}


def over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the finished runs that differ only in their seed; a single run has no
    deviation.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in rows:
        if one["status"] == FINISHED:
            groups.setdefault((one["algorithm"], one["density"], one["phase"]), []).append(one)
    measured = list(dict.fromkeys(name for one in rows for name in one))[_FIRST_MEASURED:]
    summary = []
    for (algorithm, density, phase), members in groups.items():
        figures = {name: _spread([one.get(name) for one in members]) for name in measured}
        of = {"algorithm": algorithm, "density": density, "phase": phase, "seeds": len(members)}
        summary.append({**of, "figures": {name: spread for name, spread in figures.items() if spread}})
    return summary


_FIRST_MEASURED = list(make_row(Outcome(Run(DENSE, None, 0)))).index("sent_bytes")


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": statistics.fmean(known), "std": statistics.stdev(known) if len(known) > 1 else None}


def report(outcomes: Sequence[Outcome], options: Sequence[str] = ()) -> dict[str, Any]:
    rows = [make_row(outcome) for outcome in outcomes]
    return add_schema("sweep", {"options": list(options), "runs": rows, "over_seeds": over_seeds(rows)})


def mean_rows(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of over_seeds() as flat rows.

    >>> mean_rows([{"algorithm": "oktopk", "seeds": 2, "figures": {"val loss": {"mean": 2.5, "std": 0.5}}}])
    [{'algorithm': 'oktopk', 'seeds': 2, 'val loss mean': 2.5, 'val loss std': 0.5}]
    """
    return [
        {name: value for name, value in one.items() if name != "figures"}
        | {f"{name} {kind}": value for name, figure in one["figures"].items() for kind, value in figure.items()}
        for one in groups
    ]


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write sweep.csv (runs), sweep_means.csv (means over seeds) and sweep.json, atomically."""
    texts = {
        CSV: _csv(content["runs"]),
        MEANS: _csv(mean_rows(content["over_seeds"])),
        JSON: json.dumps(content, indent=2) + "\n",
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for one in rows for name in one)
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def previous_options(folder: Path) -> list[str] | None:
    """Options of the sweep in the folder, if it has started a run."""
    try:
        before = json.loads((folder / JSON).read_text(encoding="utf-8"))["options"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_ours = isinstance(before, list) and all(isinstance(word, str) for word in before)
    return before if is_ours and any(folder.glob(f"*/{CONFIG}")) else None
