"""Runs and sweeps as pandas frames, for notebooks and scripts: oktopk.load_run and oktopk.load_sweep."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.errors import OkTopkError
from oktopk.utils.extras import install_command

from .report.analysis.parsing import Row, json_file, number, text
from .report.analysis.runs import SWEEP, Run, Step, find_runs, name_runs, read_run
from .sweep import mean_rows

if TYPE_CHECKING:
    from pandas import DataFrame

_OWN = ("run", "algorithm", "density", "seed")
"""What identifies a run of a sweep, in front of the columns of its steps."""


@dataclass(frozen=True, repr=False)
class RunFrames:
    """One run, finished or not.

    Attributes:
        name: the name of its folder.
        steps: a row for each step: `step`, `phase`, `skipped`, the columns of the reducer
            (docs/guides/metrics.md), and those of the training loop such as `loss`, `lr`, `forward_seconds` and
            `step_seconds`.
        reductions: a row for each bucket of each step: `step`, `bucket`, `phase`, `algorithm`, and its columns.
        validations: a row for each validation: `step`, `epoch`, and its metrics.
        plan: what the run was going to do (plan.json).
        result: the figures at its end (result.json); empty if it has none.
        config: its options, as TOML.
        notes: what was missing or damaged.
    """

    name: str
    steps: DataFrame
    reductions: DataFrame
    validations: DataFrame
    plan: Row
    result: Row
    config: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<run {self.name}: {len(self.steps)} steps, {len(self.validations)} validations>"


@dataclass(frozen=True, repr=False)
class SweepFrames:
    """The runs of a sweep.

    Attributes:
        runs: a row for each run, as in sweep.csv: status, last validation, means per step.
        means: mean and standard deviation over seeds, as in sweep_means.csv.
        steps: the steps of all runs, with the columns `run`, `algorithm`, `density` and `seed` in front.
        validations: their validations, with the same columns.
        notes: what was missing or damaged, by run.
    """

    runs: DataFrame
    means: DataFrame
    steps: DataFrame
    validations: DataFrame
    notes: Mapping[str, tuple[str, ...]]

    def __repr__(self) -> str:
        return f"<sweep: {len(self.runs)} runs, {len(self.steps)} steps>"


def load_run(path: str | os.PathLike[str]) -> RunFrames:
    """Read a run folder into pandas frames. A running job can be read, too.

    Args:
        path: the folder of `oktopk train --out`, or one with the metrics.jsonl of a JSONLSink.

    Raises:
        ImportError: pandas is not installed; the message says how to install it.
        OkTopkError: there is no run in the folder.

    Example:
        >>> import oktopk, tempfile, torch
        >>> from oktopk.metrics.sinks import JSONLSink
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sinks = [JSONLSink(f"{folder}/metrics.jsonl")]
        ...     with oktopk.AllReducer(parameters, density=0.1, warmup_steps=1, sinks=sinks) as reducer:
        ...         for _ in range(3):
        ...             grads = reducer.sync({"w": torch.arange(50.0)})
        ...     run = oktopk.load_run(folder)
        >>> run.steps[["step", "phase", "payload_bytes"]].values.tolist()
        [[0, 'dense', 200.0], [1, 'sparse', 40.0], [2, 'sparse', 40.0]]
    """
    pandas = _pandas()
    folders = find_runs([Path(path)], inf)
    if folders != [Path(path).resolve()]:
        raise OkTopkError(f"{path} holds {len(folders)} runs: pass one of them, or use load_sweep()")
    return _frames(pandas, read_run(folders[0], name_runs(folders)[0]))


def load_sweep(path: str | os.PathLike[str]) -> SweepFrames:
    """Read the folder of a sweep, or any folder of runs, into pandas frames.

    Args:
        path: the folder of `oktopk sweep --out`.

    Raises:
        ImportError: pandas is not installed; the message says how to install it.
        OkTopkError: there is no run in the folder.
    """
    pandas = _pandas()
    folders = find_runs([Path(path)], inf)
    runs = [read_run(folder, name) for folder, name in zip(folders, name_runs(folders), strict=True)]
    summary = json_file(Path(path) / SWEEP, [])
    rows = _rows(summary.get("runs")) or [_identity(run) for run in runs]
    groups = [{**row, "figures": _figures(row.get("figures"))} for row in _rows(summary.get("over_seeds"))]
    known = {text(row.get("run")): {name: row.get(name) for name in _OWN} for row in rows}
    own = {run.name: known.get(run.name) or _identity(run) for run in runs}
    return SweepFrames(
        pandas.DataFrame(rows),
        pandas.DataFrame(mean_rows(groups)),
        pandas.DataFrame([own[run.name] | _step(step) for run in runs for step in run.steps]),
        pandas.DataFrame([own[run.name] | row for run in runs for row in _validations(run)]),
        {run.name: run.notes for run in runs if run.notes},
    )


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"frames need the package pandas: {install_command('report')}") from error
    return pandas


def _frames(pandas: Any, run: Run) -> RunFrames:
    return RunFrames(
        run.name,
        pandas.DataFrame([_step(step) for step in run.steps]),
        pandas.DataFrame([row for step in run.steps for row in _reductions(step)]),
        pandas.DataFrame(_validations(run)),
        run.plan,
        run.result,
        run.config,
        run.notes,
    )


def _step(step: Step) -> dict[str, Any]:
    """One row of a step. Both the reducer and the loop have `exposed_seconds`: that of the loop counts."""
    own = {"step": step.number, "phase": step.phase, "skipped": step.skipped, "culprits": step.culprits}
    return {**own, **{name: value for name, value in {**step.numbers, **step.train}.items() if name not in own}}


def _reductions(step: Step) -> Iterable[dict[str, Any]]:
    for one in step.reductions:
        own = {"step": step.number, "bucket": one.bucket, "phase": one.phase, "algorithm": one.algorithm}
        yield {**own, **{name: value for name, value in one.numbers.items() if name not in own}}


def _validations(run: Run) -> list[dict[str, Any]]:
    return [{"step": one.step, "epoch": one.epoch, **one.figures} for one in run.validations]


def _identity(run: Run) -> dict[str, Any]:
    known = {"run": run.name, "algorithm": run.algorithm}
    return {name: known[name] if name in known else run.lookup(name) for name in _OWN}


def _rows(value: object) -> list[dict[str, Any]]:
    """The objects of a list that was read from a file."""
    return [dict(row) for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _figures(value: object) -> dict[str, dict[str, float | None]]:
    known = value if isinstance(value, dict) else {}
    return {
        text(name): {kind: number(figure.get(kind)) for kind in ("mean", "std")}
        for name, figure in known.items()
        if isinstance(figure, dict)
    }
