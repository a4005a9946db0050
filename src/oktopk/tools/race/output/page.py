"""The page of a race: one self-contained HTML file, in the style of the report's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.tools.crossover import format_rate
from oktopk.tools.report.html import tables as html
from oktopk.tools.report.html.colours import GREY, series_style
from oktopk.tools.report.html.drawing import DIGITS, Chart, Trace, figure, label, line
from oktopk.tools.report.html.page import Contents, Draft, render_page

from ..links import link_name, link_rate
from ..summary import COMPOSED
from .tables import break_name, cells_of, head, notes

Document = Mapping[str, Any]
Trials = Sequence[Mapping[str, Any]]
_LONGEST = 100
"""Letters of a name: contenders may differ in their last setting only."""


def build_page(document: Document) -> str:
    """Build the page of a race."""
    draft = Draft()
    what = document["target"] or (
        f"{document['seconds']:g} s each" if document["seconds"] is not None else "a fixed number of steps"
    )
    config, ranks = document["race"]["config"], document["race"]["ranks"]
    about = f"{config['dnn']}, {ranks} ranks; " + (
        f"target {what}" if document["target"] else f"compared after {what}"
    )
    rows = [cells_of(row, document) for row in document["rows"]]
    body = "".join([
        f'<h1>oktopk race</h1><p class="soft">{html.safe(about)}</p>',
        draft.text("table", html.table(head(document), rows, long=0)),
        draft.text("notes", "".join(f"<p>{html.safe(note)}</p>" for note in notes(document)), "soft"),
        *(_of_link(draft, place, link, document) for place, link in enumerate(links_of(document))),
        _over_links(draft, document),
    ])  # fmt: skip
    return render_page(Contents("oktopk race", body, draft.parts, draft.figures))


def links_of(document: Document) -> list[str]:
    """The links, fast ones first."""
    return sorted({trial["link"] for trial in document["trials"]}, key=lambda link: -link_rate(link))


def contenders_of(document: Document) -> list[str]:
    """The contenders, in an order that all charts share."""
    return list(dict.fromkeys(row["contender"] for row in document["rows"]))


def _of_link(draft: Draft, place: int, link: str, document: Document) -> str:
    trials = [trial for trial in document["trials"] if trial["link"] == link]
    composed = {trial["contender"] for trial in trials if trial["how"] == COMPOSED}
    chosen = [t for t in trials if t["how"] == COMPOSED or t["contender"] not in composed]
    axes = [
        ("time", "against time", "seconds", "time on the clock (s)", "s"),
        ("bytes", "against bytes", "sent_bytes", "bytes sent by a rank (B)", "B"),
        ("steps", "against steps", "step", "steps", "steps"),
    ]
    metric = str(document["metric"])
    charts = [
        _curves(document, chosen, name, f"{label(metric).capitalize()} {title}", column, x, unit)
        for name, title, column, x, unit in axes
    ]
    found = [chart for chart in (*charts, _outcome(document, link)) if chart is not None]
    return f"<h2>{html.safe(link_name(link))}</h2>{draft.grid(f'link{place}', found)}"


def _curves(
    document: Document, trials: Trials, name: str, title: str, column: str, x: str, unit: str
) -> Chart | None:
    """One line per contender and seed; seeds share a colour."""
    order, metric, traces = contenders_of(document), document["metric"], list[Trace]()
    seen: set[str] = set()
    for trial in sorted(trials, key=lambda trial: order.index(trial["contender"])):
        points = [(p[column], p["metrics"].get(metric)) for p in trial["curve"] if name != "bytes" or p["step"]]
        if not any(y is not None for _, y in points):
            continue
        colour, dash = series_style(order.index(trial["contender"]))
        shown = label(trial["contender"], _LONGEST)
        traces.append(
            line(
                shown, [point[0] for point in points], [point[1] for point in points], colour, line={"dash": dash},
                mode="lines+markers", marker={"size": 5}, legendgroup=shown, showlegend=shown not in seen,
                hovertemplate=f"{shown}, seed {trial['seed']}: %{{y:{DIGITS}}} after %{{x:.4~s}} {unit}"
                "<extra></extra>",
            )
        )  # fmt: skip
        seen.add(shown)
    if not traces:
        return None
    chart = figure(traces, x, label(metric), hovermode="closest", **_target_line(document))
    chart["layout"]["yaxis"].pop("rangemode")
    if name == "bytes":
        chart["layout"]["xaxis"] |= {"type": "log", "exponentformat": "SI"}
    caption = {
        "time": "Clock: training steps of the slowest rank; validation and compilation are not counted.",
        "bytes": "Counted by the kernel on links; modelled or metered on loopback. Logarithmic axis.",
        "steps": "Optimizer steps. One line per seed.",
    }[name]
    return Chart(name, title, caption, chart)


def _target_line(document: Document) -> dict[str, Any]:
    target = document["race"]["target"]
    if target is None:
        return {}
    at = {"yref": "y", "y0": target["value"], "y1": target["value"], "xref": "paper", "x0": 0, "x1": 1}
    return {"shapes": [{"type": "line", **at, "line": {"color": GREY, "width": 1, "dash": "dash"}}]}


def _outcome(document: Document, link: str) -> Chart | None:
    """Time to target with its spread, or the last metric of cells of the same length."""
    by_time = document["target"] is not None
    key, digits = ("seconds", ".1f") if by_time else ("final", ".3f")
    rows = [row for row in document["rows"] if row["link"] == link and row[key] is not None]
    if not rows:
        return None
    order, spreads = contenders_of(document), [row[key]["std"] or 0.0 for row in rows]
    names = [row["contender"] + (" (composed)" if row["how"] == COMPOSED else "") for row in rows]
    shown = ["<br>".join(map(label, break_name(name))) for name in names]
    colours = [series_style(order.index(row["contender"]))[0] for row in rows]
    trace: Trace = {
        "type": "scatter", "mode": "markers+text", "name": key,
        "x": [row[key]["mean"] for row in rows], "y": shown,
        "error_x": {"type": "data", "array": spreads, "visible": any(spreads), "color": GREY},
        "marker": {"color": colours, "size": 11}, "text": [f"{row[key]['mean']:{digits}}" for row in rows],
        "textposition": "top center", "cliponaxis": False, "hovertemplate": "%{x:.4~f}<extra></extra>",
    }  # fmt: skip
    what = f"time to {document['target']} (s)" if by_time else f"last {document['metric']}"
    chart = figure([trace], what, "", hovermode="closest")
    last = len(rows) - 1
    chart["layout"]["yaxis"] = {"automargin": True, "type": "category", "range": [last + 0.5, -0.7]}
    if by_time:
        chart["layout"]["xaxis"]["rangemode"] = "tozero"
    left_out = " Contenders that did not reach the target are left out." if by_time else ""
    caption = f"Mean over seeds; the line is a standard deviation.{left_out}"
    title = "Time to target" if by_time else f"{str(document['metric']).capitalize()} at the end"
    return Chart("outcome", title, caption, chart)


def _over_links(draft: Draft, document: Document) -> str:
    """Time to target by rate, and the crossover."""
    rows = [
        row for row in document["rows"] if row["seconds"] is not None and link_rate(row["link"]) < float("inf")
    ]
    if len({row["link"] for row in rows}) < 2:
        return ""
    traces = []
    for place, name in enumerate(contenders_of(document)):
        own = sorted((row for row in rows if row["contender"] == name), key=lambda row: link_rate(row["link"]))
        points = {link_rate(row["link"]) / 1e6: row["seconds"]["mean"] for row in own}
        colour, dash = series_style(place)
        if points:
            marks: dict[str, Any] = {"mode": "lines+markers", "line": {"dash": dash}}
            traces.append(line(label(name, _LONGEST), list(points), list(points.values()), colour, "s", **marks))
    chart = figure(traces, "rate of the links (Mbit/s)", "time to target (s)", log=True, hovermode="closest")
    rates = sorted({link_rate(row["link"]) / 1e6 for row in rows})
    chart["layout"]["xaxis"] |= {"type": "log", "tickvals": rates, "ticktext": [f"{rate:g}" for rate in rates]}
    found = [one for one in document["crossovers"] if one["measured"] or one["predicted"]]
    table = html.table(
        ["contender", "against", "B* measured", "B* predicted"],
        [
            [one["contender"], one["against"], format_rate(one["measured"]), format_rate(one["predicted"])]
            for one in found
        ],
    )
    caption = "Both axes are logarithmic. Below B*, the contender reaches the target before DDP."
    charts = draft.grid("links", [Chart("rates", "Time to target by rate", caption, chart)])
    return f"<h2>Crossover</h2>{draft.text('crossovers', table)}{charts}"
