"""The texts and tables of the page as HTML. Every value is escaped with `safe`."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..analysis.times import STAGES
from ..units import format_bytes, format_seconds, percent
from . import colours

_END = re.compile(r"[.] (?=\S)")
"""The end of a sentence."""
_PAUSE, _LONG = re.compile(r"[.;:] (?=\S)"), 110
"""Where a sentence of more letters than that is cut."""
_COLON = re.compile(r":(?=\w)")


def safe(value: object) -> str:
    return html.escape(str(value))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], long: int | None = None) -> str:
    """Make an HTML table; `long` is the column that may wrap. A phone shows tables of more than three columns as a
    list for each row, with the names of the columns.
    """
    title = "".join(f"<th>{safe(name)}</th>" for name in head)
    lines = ["".join(_cell(cell, head[place], place == long) for place, cell in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    kind = ' class="wide"' if len(head) > 3 else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{title}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object, name: str, long: bool) -> str:
    kinds = ["long"] * long + ["none"] * (value is None or value == "")
    shown = "–" if value is None else breakable(value)
    return f'<td data-name="{safe(name)}" class="{" ".join(kinds)}">{shown}</td>'


def breakable(value: object) -> str:
    """The text, which may be broken after a colon: the names of contenders are long.

    >>> breakable("oktopk:auto=<b>")
    'oktopk:<wbr>auto=&lt;b&gt;'
    """
    return _COLON.sub(":<wbr>", safe(value))


def about(run: Mapping[str, Any]) -> str:
    """Describe the run in one line."""
    known = run["about"]
    what = " on ".join(str(known[name]) for name in ("dnn", "dataset") if known[name])
    density = (
        ""
        if known["density"] is None or known["algorithm"] == "dense"
        else f" at density {_asked(known['density'], plain)}"
    )
    ended = "finished" if known["finished"] else "not finished"
    parts = [
        what,
        f"{known['algorithm']}{density}",
        "1 rank" if known["world"] == 1 else f"{known['world']} ranks" if known["world"] else "",
        f"{known['parameters']:,.0f} parameters" if isinstance(known["parameters"], float) else "",
        f"seed {plain(known['seed'])}" if known["seed"] is not None else "",
        f"{known['steps']:,} steps",
        ended if known["planned"] else "",  # the script of a user does not say when it ends
    ]
    return f'<p class="soft">{safe(" · ".join(part for part in parts if part))}</p>'


def _asked(density: float | str, form: Callable[[Any], str]) -> str:
    """The density that was asked for: a number, auto, or a schedule, which is too long to show."""
    if isinstance(density, str):
        return "of a schedule" if ":" in density else density
    return form(density)


def plain(value: object) -> str:
    """
    >>> plain(0.01), plain(3.0), plain("x"), plain(27569568.0)
    ('0.01', '3', 'x', '27,569,568')
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)


def answers(run: Mapping[str, Any]) -> str:
    """Each question with the first sentence of its answer; the rest opens on a click."""
    return f'<dl class="answers">{"".join(_answer(one["question"], one["answer"]) for one in run["answers"])}</dl>'


def _answer(question: str, answer: str) -> str:
    end = _END.search(answer)
    if end and end.start() > _LONG:
        end = _PAUSE.search(answer) or end
    short, rest = (answer[: end.start() + 1], answer[end.end() :]) if end else (answer, "")
    if not rest:
        return f"<div><dt>{safe(question)}</dt><dd>{safe(answer)}</dd></div>"
    more = f"<details><summary>{safe(short)} </summary><span>{safe(rest)}</span></details>"
    return f"<div><dt>{safe(question)}</dt><dd>{more}</dd></div>"


def notes(run: Mapping[str, Any]) -> str:
    """What is missing or damaged, or must be known to read the page."""
    return "".join(f"<p>{safe(note)}</p>" for note in run["notes"])


def thinned(run: Mapping[str, Any]) -> str:
    width = run["series"]["steps_per_point"]
    if width <= 1:
        return ""
    return f"<p>Curves are thinned: a point stands for up to {width:,} steps, its band for their range.</p>"


_MEANS: tuple[tuple[str, str, Any], ...] = (
    ("steps", "steps", plain),
    ("skipped steps", "skipped", plain),
    ("mean loss", "loss", lambda x: f"{x:.4g}"),
    ("target density", "target_density", percent),
    ("density sent by rank 0", "local_density", percent),
    ("density of the result", "global_density", percent),
    ("sent by rank 0", "sent_bytes", format_bytes),
    ("of these, control", "control_bytes", format_bytes),
    ("of these, modelled as a ring", "modelled_bytes", format_bytes),
    ("received by rank 0", "received_bytes", format_bytes),
    ("payload by the formula (8 B per entry)", "payload_bytes", format_bytes),
    ("a dense step (ring)", "dense_bytes", format_bytes),
    ("sent by rank 0, of a dense step", "of_dense", percent),
    ("6k(P−1)/P words", "bound_6k_bytes", format_bytes),
    ("2k(P−1)/P words", "bound_2k_bytes", format_bytes),
    ("messages sent by rank 0", "sent_messages", lambda x: f"{x:.3g}"),
    ("step", "step_seconds", format_seconds),
    ("hidden share of the reductions' work", "hidden_work_share", percent),
)


def phase_table(run: Mapping[str, Any]) -> str:
    """Means per step, the phases side by side."""
    phases = run["phases"]
    if not phases:
        return ""
    rows = [
        [title, *(None if means[key] is None else form(means[key]) for means in phases.values())]
        for title, key, form in _MEANS
        if any(means[key] is not None for means in phases.values())
    ]
    for stage in STAGES:
        rows += _stage_rows(stage, list(phases.values()))
    ranks = max((len(means["sent_bytes_by_rank"] or ()) for means in phases.values()), default=0)
    for rank in range(min(ranks, 64)):
        sent = [_of_rank(means["sent_bytes_by_rank"], rank) for means in phases.values()]
        rows.append([f"sent by rank {rank} (finished epochs)", *sent])
    caption = (
        "Hidden: ran during backward and cost the step nothing. The other times are exposed: the step waited. "
        "Times leave out the first step of a phase. Target density: what the steps aimed at; it is above the one "
        "asked for while it still falls (ramp)."
    )
    return table(["", *phases], rows) + f'<p class="soft">{caption}</p>'


def _stage_rows(stage: str, phases: Sequence[Mapping[str, Any]]) -> list[list[str | None]]:
    """The time of a stage, and, if there is any, what of it was hidden."""
    shown = [means["seconds"].get(stage) for means in phases]
    hidden = [means["hidden_seconds"].get(stage) for means in phases]
    name = f"… {colours.STAGE_NAME[stage]}"
    rows = [[name, *(_or(format_seconds, seconds) for seconds in shown)]] if any(map(bool, shown)) else []
    if any(hidden):
        rows.append([f"{name}, hidden", *(_or(format_seconds, seconds) for seconds in hidden)])
    return rows


def _of_rank(ranks: Sequence[float] | None, rank: int) -> str | None:
    return format_bytes(ranks[rank]) if ranks is not None and rank < len(ranks) else None


def message_table(run: Mapping[str, Any]) -> str:
    if not run["messages"]:
        return ""
    rows = []
    for kind in run["messages"]:
        steps = run["phases"].get(kind["phase"], {}).get("steps") or 1
        size = kind["bytes"] / kind["messages"] if kind["messages"] else None
        remark = "modelled as a ring" * kind["modelled"] + ", " * (kind["modelled"] and kind["control"])
        rows.append(
            [
                *(f"{kind['operation']}, {kind['stage']}", kind["phase"] or None),
                remark + "control" * kind["control"] or None,
                *(f"{kind['messages'] / steps:.3g}", format_bytes(kind["bytes"] / steps), _or(format_bytes, size)),
                *(format_bytes(kind["bytes"]), format_seconds(kind["seconds"] / steps)),
            ]
        )
    head = [
        "operation, stage",
        "phase",
        "kind",
        "messages per step",
        "bytes per step",
        "mean size",
        "bytes in all",
    ]
    return table([*head, "time per step"], rows)


def skipped(run: Mapping[str, Any]) -> str:
    found = run["skipped"]
    if not found["count"]:
        return ""
    more = found["count"] - len(found["listed"])
    rows = [[one["step"], one["phase"] or None, one["culprits"] or "not known"] for one in found["listed"]]
    rest = f"<p>and {more:,} more</p>" if more else ""
    return f"<p>{found['count']:,} steps</p>" + table(["step", "phase", "non-finite"], rows, long=2) + rest


def plan(run: Mapping[str, Any]) -> str:
    known = run["plan"]
    sentences = [known.get("sentence"), known.get("warning"), *known["volume"]]
    rows = [[name, plain(value)] for name, value in known.items() if name not in ("sentence", "warning", "volume")]
    texts = "".join(f"<p>{safe(sentence)}</p>" for sentence in sentences if sentence)
    return texts + (table(["", ""], rows) if rows else "")


def config(run: Mapping[str, Any]) -> str:
    return f"<pre>{safe(run['config'])}</pre>" if run["config"] else ""


def finals(rows: Sequence[Mapping[str, Any]]) -> str:
    """All runs, one below the other."""
    validated = list(dict.fromkeys(name for row in rows for name in row["validation"]))[:8]
    columns = {
        "run": [row["run"] for row in rows],
        "algorithm": [row["algorithm"] for row in rows],
        "steps": _column(rows, "steps", "{:,}".format),
        "last loss": _column(rows, "loss", "{:.4g}".format),
        **{name: _column([row["validation"] for row in rows], name, "{:.4g}".format) for name in validated},
        "sent per step": _column(rows, "sent_bytes", format_bytes),
        "of dense": _column(rows, "of_dense", percent),
        "time per step": _column(rows, "step_seconds", format_seconds),
        "hidden": _column(rows, "hidden_work_share", percent),
        "sent in all": _column(rows, "sent_so_far_bytes", format_bytes),
        "time in steps": _column(rows, "elapsed_seconds", format_seconds),
        "density asked for": _column(rows, "density", lambda asked: _asked(asked, percent)),
        "density sent": _column(rows, "local_density", percent),
        "phase": [row["phase"] for row in rows],
        "ranks": [row["world"] for row in rows],
        "skipped": [row["skipped"] for row in rows],
        "": ["" if row["finished"] else "not finished" for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if name == "run" or len(set(cells)) > 1}
    note = '<p class="soft">Columns in which all runs agree are left out; each run has them below.</p>'
    return table(list(shown), list(zip(*shown.values(), strict=True)), long=0) + note


def _column(rows: Sequence[Mapping[str, Any]], name: str, form: Callable[[Any], str]) -> list[str | None]:
    return [_or(form, row.get(name)) for row in rows]


def _or(form: Callable[[Any], str], value: Any) -> str | None:
    return None if value is None else form(value)
