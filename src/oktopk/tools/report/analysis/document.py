"""Build the report as one JSON document, from which the page is drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from oktopk.metrics.sinks.flat import finite
from oktopk.utils.schemas import add_schema

from .answers import answers, first_sparse
from .messages import count_messages
from .parsing import LONGEST_TEXT, numbers, text
from .phases import phases
from .runs import Run
from .series import MOST_BUCKETS, series

MOST_POINTS = 400
"""Points of a curve."""
POINTS_OF_ALL_RUNS = 6000
MOST_SKIPPED = 200
"""Limit on listed skipped steps."""
_AUTO = re.compile(r"^auto = (true|false)\b", re.MULTILINE)
"""A line of the run's configuration."""


def build_report(runs: Sequence[Run]) -> dict[str, Any]:
    most = max(50, min(MOST_POINTS, POINTS_OF_ALL_RUNS // max(1, len(runs))))
    every = [describe_run(run, most) for run in runs]
    document: dict[str, Any] = finite({"runs": every, "finals": [summarize_run(one) for one in every]})
    return add_schema("report", document)


def describe_run(run: Run, most: int = MOST_POINTS) -> dict[str, Any]:
    means, moved = phases(run), count_messages(run)
    return {
        "name": run.name,
        "about": {
            **{name: run.lookup(name) for name in ("dnn", "dataset", "density", "seed", "parameters", "metric")},
            "planned": bool(run.plan or run.result),
            "auto": _is_auto(run),
            "algorithm": run.algorithm,
            "world": run.world,
            "steps": len(run.steps),
            "finished": (run.result or run.plan).get("finished") is True,
        },
        "answers": answers(run, means, moved),
        "first_sparse_step": first_sparse(run),
        "now": _now(run),
        "phases": means,
        "series": series(run, most),
        "messages": moved,
        "validations": [
            {"step": one.step, "epoch": one.epoch, "figures": dict(one.figures)} for one in run.validations
        ],
        "decisions": [{"step": one.step, "dense": one.dense, **one.figures} for one in run.decisions],
        "skipped": _skipped(run),
        "plan": _plan(run),
        "config": run.config,
        "notes": _notes(run),
    }


def _is_auto(run: Run) -> bool | None:
    """Whether the run chose between dense and sparse by measurement; None if its settings are not known."""
    planned, written = run.plan.get("auto"), _AUTO.search(run.config)
    if isinstance(planned, bool):
        return planned
    return None if written is None else written[1] == "true"


def _now(run: Run) -> dict[str, Any]:
    """The phase of the last steps, and the first of them."""
    parts = [list(part) for _, part in groupby(run.steps, key=lambda step: step.phase)]
    return {"phase": parts[-1][0].phase, "since": parts[-1][0].number} if parts else {"phase": "", "since": None}


def _skipped(run: Run) -> dict[str, Any]:
    steps = [step for step in run.steps if step.skipped]
    listed = [{"step": one.number, "phase": one.phase, "culprits": one.culprits} for one in steps[:MOST_SKIPPED]]
    return {"count": len(steps), "listed": listed}


def _plan(run: Run) -> dict[str, Any]:
    """The texts and numbers of the plan, and its lines on volume."""
    volume = run.plan.get("volume")
    lines = [text(line) for line in volume] if isinstance(volume, list) else []
    words = {text(name): text(value) for name, value in run.plan.items() if isinstance(value, str)}
    return {**numbers(run.plan), **words, "volume": [line for line in lines if line]}


def _notes(run: Run) -> list[str]:
    buckets = {part.bucket for step in run.steps for part in step.reductions}
    notes = list(run.notes)
    if len(buckets) > MOST_BUCKETS:
        notes.append(f"There are {len(buckets)} buckets: the thresholds of the first {MOST_BUCKETS} are shown.")
    traffic = sum(moved.bytes for step in run.steps for moved in step.traffic or ())
    sent = sum(step.numbers.get("sent_bytes", 0.0) for step in run.steps if step.traffic is not None)
    if abs(traffic - sent) > 0.5:
        notes.append(f"The bytes of the operations add up to {traffic:,.0f}, those of the steps to {sent:,.0f}.")
    if run.world is None and run.steps:
        notes.append("The number of ranks is not known, so there are no bounds to compare bytes with.")
    if run.world == 1:
        notes.append(
            "There is only one rank: nothing is sent, there is nothing to compress, and there are no bounds."
        )
    if any(len(step.culprits) == LONGEST_TEXT for step in run.steps):
        notes.append(f"Long lists of non-finite parameters are cut after {LONGEST_TEXT} characters.")
    return notes


def summarize_run(run: dict[str, Any]) -> dict[str, Any]:
    """Summarise a run in one row: its final metrics, and means over its sparse steps, or its dense steps if it has
    no others.
    """
    about, means = run["about"], run["phases"]
    phase = next((name for name in ("sparse", "dense") if name in means), None)
    of = means.get(phase, {})
    last = run["validations"][-1]["figures"] if run["validations"] else {}
    return {
        "run": run["name"],
        **{name: about[name] for name in ("algorithm", "density", "seed", "world", "steps", "finished")},
        "phase": phase,
        "loss": next((value for value in reversed(run["series"]["loss"]["mean"]) if value is not None), None),
        "step_seconds": of.get("step_seconds"),
        "hidden_work_share": of.get("hidden_work_share"),
        "sent_bytes": of.get("sent_bytes"),
        "of_dense": of.get("of_dense"),
        "sent_so_far_bytes": next(reversed(run["series"]["sent_so_far_bytes"]), None),
        "elapsed_seconds": next(reversed(run["series"]["elapsed_seconds"]), None),
        "local_density": of.get("local_density"),
        "skipped": run["skipped"]["count"],
        "validation": last,
    }
