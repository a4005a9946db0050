"""The race as text and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.metrics.events import DENSE
from oktopk.tools.crossover import format_rate
from oktopk.tools.tables import format_table

from ..contenders import parse_contender
from ..links import link_name
from ..spec import RaceError
from ..summary import COMPOSED

Document = Mapping[str, Any]


def break_name(name: str, longest: int = 24) -> list[str]:
    """Break a long name at its settings.

    >>> break_name("oktopk:density=0.05:values=fp16:warmup_steps=10")
    ['oktopk:density=0.05:', 'values=fp16:', 'warmup_steps=10']
    """
    lines = [""]
    for part in re.findall(r"[^:]+:?|:", name):
        if lines[-1] and len(lines[-1]) + len(part) > longest:
            lines.append("")
        lines[-1] += part
    return lines


def format_spread(figure: Mapping[str, Any] | None, digits: str) -> str:
    """
    >>> format_spread({"mean": 12.5, "std": None}, ".1f"), format_spread({"mean": 1.0, "std": 0.25}, ".2f")
    ('12.5', '1.00 ± 0.25')
    """
    if figure is None:
        return "–"
    spread = "" if figure["std"] is None else f" ± {figure['std']:{digits}}"
    return f"{figure['mean']:{digits}}{spread}"


def outcome(row: Mapping[str, Any]) -> str:
    """Time to the target, or that it was not reached."""
    if row["seconds"] is not None:
        return f"{format_spread(row['seconds'], '.1f')} s"
    missed = row["seeds"] - row["reached"]
    who = "" if row["seeds"] == 1 else f" by {missed} of {row['seeds']} seeds"
    best = "" if row["best"] is None else f"; best {row['best']:.4g}"
    why = "diverged" if "diverged" in row["ended"] else f"not reached{who} in {row['most_steps']:,} steps"
    return f"{why}{best}"


def head(document: Document) -> list[str]:
    """The columns of the table."""
    if document["target"] is not None:
        found = [f"time to {document['target']}", "ddp / it", "steps"]
    else:
        steps = "steps" if document["seconds"] is None else f"steps in {document['seconds']:g} s"
        found = [f"last {document['metric']}", steps]
    return [
        "contender",
        "link",
        *found,
        *("ms/step", "dense", "compressed", "MB/step", "of dense", "seeds", "run"),
    ]


def cells_of(row: Mapping[str, Any], document: Document) -> list[object]:
    """One row of the table."""
    phases = row["phase_seconds"]
    compressed = [value for name, value in phases.items() if name not in (DENSE, "ramp")]
    steps, ratio = format_spread(row["steps"], ".0f"), row["ddp_over_it"]
    if document["target"] is None:
        found = [format_spread(row["final"], ".4f"), steps]
    else:
        found = [outcome(row), "–" if ratio is None else f"{ratio:.2f}", steps]
    return [
        row["contender"],
        link_name(row["link"]),
        *found,
        _milliseconds(row["step_seconds"]),
        _milliseconds(phases.get(DENSE)),
        _milliseconds(compressed[0] if compressed else None),
        None if row["sent_bytes"] is None else f"{row['sent_bytes'] / 1e6:.3g}",
        None if row["of_dense"] is None else f"{100 * row['of_dense']:.3g} %",
        row["seeds"],
        row["how"],
    ]


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:,.{1 if seconds < 0.1 else 0}f}"


def notes(document: Document) -> list[str]:
    """What to say below the table."""
    rows, said = document["rows"], []
    if rows and all(row["seeds"] == 1 for row in rows):
        said.append("single runs: one seed each, so that nothing is known about their spread")
    if any(row["how"] == COMPOSED for row in rows):
        said.append(
            "composed: quality by step on loopback × mean step times over the link; full: run over the link"
        )
    if rows:
        said.append(
            "MB/step: bytes that a rank sent, mean over all steps, dense ones too; of dense: against a ring"
        )
    if document["race"]["ranks"] == 1:
        said.append("one rank: there is nothing to exchange, so that only the cost of compression is compared")
    said += _asked(rows)
    for one in document["deviations"]:
        where = f"{one['contender']}, {link_name(one['link'])}, seed {one['seed']}"
        said.append(f"{where}: composed is {100 * one['composed_over_full']:+.1f} % from the full run")
    said += [_crossover(one) for one in document["crossovers"]]
    said += [f"failed: {one['cell']}: {one['problem']}" for one in document["failures"]]
    return said


def _asked(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The density that each of ours was asked for, and its dense warm-up; their names do not have the defaults."""
    said = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        try:
            settings = parse_contender(name).settings
        except RaceError:  # the folder of another version: its results are shown all the same
            continue
        if settings is not None and settings.algorithm.name != DENSE:
            known, density = "by measurement", settings.density
            if isinstance(density, float | int):
                known = f"{density:g} (n/k {1 / density:.4g})"
            said.append(f"{name}: density asked for {known}, {settings.warmup_steps} dense steps first")
    return said


def _crossover(one: Mapping[str, Any]) -> str:
    name = f"{one['contender']} against {one['against']}"
    predicted = "" if one["predicted"] is None else f", predicted {format_rate(one['predicted'])}"
    if one["measured"] is not None:
        return f"{name}: faster below B* = {format_rate(one['measured'])} (measured{predicted})"
    if not one["links"]:
        return f"{name}: no limited link was measured{predicted}"
    if one["faster_on"] == one["links"]:
        return f"{name}: faster on all links{predicted and ', B*' + predicted[1:]}"
    return f"{name}: {'slower on all links' if not one['faster_on'] else 'no single crossover'}{predicted}"


def text(document: Document) -> str:
    """The table, and notes below."""
    parts = [
        format_table(head(document), [cells_of(row, document) for row in document["rows"]])
        if document["rows"]
        else "no finished cells"
    ]
    return "\n".join([*parts, *notes(document)])


def csv_text(document: Document) -> str:
    """One line per contender, link and seed."""
    names = [
        *("contender", "link", "seed", "how", "ended", "steps", "seconds", "sent_bytes"),
        *("reached_step", "reached_seconds", "reached_bytes", "best", "last"),
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for trial in document["trials"]:
        curve: Sequence[Mapping[str, Any]] = trial["curve"]
        last = curve[-1]["metrics"].get(document["metric"]) if curve else None
        writer.writerow({**trial, "last": last})
    return file.getvalue()
