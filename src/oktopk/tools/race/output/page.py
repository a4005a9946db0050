"""The page of a race: one self-contained HTML file, in the style of the report's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.tools.crossover import format_rate
from oktopk.tools.report.html import tables as html
from oktopk.tools.report.html.colours import GREY, family_styles
from oktopk.tools.report.html.comparison import draw_group
from oktopk.tools.report.html.drawing import DIGITS, Chart, Trace, figure, is_positive, label, line
from oktopk.tools.report.html.groups import Group
from oktopk.tools.report.html.page import Contents, Draft, render_page
from oktopk.tools.report.html.tiles import draw_tiles

from ..links import link_name, link_rate
from ..summary import COMPOSED
from .headline import race_tiles
from .tables import break_name, cells_of, head, notes

Document = Mapping[str, Any]
Trials = Sequence[Mapping[str, Any]]
_LONGEST = 100
"""Letters of a name: contenders may differ in their last setting only."""


def build_page(document: Document) -> str:
    """Build the page of a race."""
    draft, links = Draft(), links_of(document)
    what = document["target"] or (
        f"{document['seconds']:g} s each" if document["seconds"] is not None else "a fixed number of steps"
    )
    config, ranks = document["race"]["config"], document["race"]["ranks"]
    about = f"{ranks} ranks · " + (f"target {what}" if document["target"] else f"compared after {what}")
    rows = [cells_of(row, document) for row in document["rows"]]
    said = "".join(f"<p>{html.safe(note)}</p>" for note in notes(document))
    options = [[name, html.plain(value)] for name, value in config.items() if value is not None]
    body = "".join([
        f'<h1>Race of {html.safe(config["dnn"])}</h1><p class="soft">{html.safe(about)}</p>',
        draft.text("tiles", draw_tiles(race_tiles(document, links)), "headline"),
        draft.text("table", html.table(head(document), rows, long=0) + f'<div class="soft">{said}</div>'),
        *(_of_link(draft, place, link, document) for place, link in enumerate(links)),
        _over_links(draft, document),
        draft.fold("Configuration", "config", html.table(["option", "value"], options, long=1)),
    ])  # fmt: skip
    return render_page(Contents(f"oktopk race: {config['dnn']}", body, draft.parts, draft.figures))


def links_of(document: Document) -> list[str]:
    """The links, fast ones first."""
    return sorted({trial["link"] for trial in document["trials"]}, key=lambda link: -link_rate(link))


def styles_of(document: Document) -> dict[str, tuple[str, str]]:
    """Colour and dash of each contender, the same in all charts: one hue for each algorithm."""
    names = list(dict.fromkeys(row["contender"] for row in document["rows"]))
    return dict(zip(names, family_styles([name.partition(":")[0] for name in names]), strict=True))


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
    """The mean of each contender with the range over its seeds, and, faint, every seed."""
    metric, traces = document["metric"], list[Trace]()
    for contender, (colour, dash) in styles_of(document).items():
        own = [trial for trial in trials if trial["contender"] == contender]
        curves = {trial["seed"]: _curve(trial["curve"], column, metric, name != "bytes") for trial in own}
        known = {seed: curve for seed, curve in curves.items() if curve[0]}
        group = Group(contender, contender, own, colour, dash)
        hover = f"{label(contender, 100)}: %{{y:{DIGITS}}} after %{{x:.4~s}} {unit}<extra></extra>"
        marks: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 5}}
        if len(known) > 1:
            traces += [_seed(group, seed, curve) for seed, curve in known.items()]
        traces += draw_group(group, list(known.values()), name == "bytes", hover, **marks)
    if not traces:
        return None
    drawn = [value for trace in traces for value in trace["y"]]
    log = "loss" in str(metric) and is_positive(drawn)
    chart = figure(traces, x, label(metric), log=log, hovermode="closest", **_target_line(document))
    chart["layout"]["yaxis"].pop("rangemode", None)
    if name == "bytes":
        chart["layout"]["xaxis"] |= {"type": "log", "exponentformat": "SI"}
    caption = {
        "time": "Clock: training steps of the slowest rank; validation and compilation are not counted.",
        "bytes": "Counted by the kernel on links; modelled or metered on loopback. Logarithmic axis.",
        "steps": "Optimizer steps.",
    }[name]
    several = any(row["seeds"] > 1 for row in document["rows"])
    bands = " Mean over seeds, as far as all of them went; band: lowest to highest; faint: each seed."
    return Chart(name, title, caption + bands * several, chart)


def _curve(points: Trials, column: str, metric: str, start: bool) -> tuple[list[float], list[float]]:
    """What is known of the metric; without the validation before the first step if `start` is False."""
    known = [(p[column], p["metrics"].get(metric)) for p in points if start or p["step"]]
    pairs = [(x, y) for x, y in known if y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _seed(group: Group, seed: int, curve: tuple[list[float], list[float]]) -> Trace:
    faint: dict[str, Any] = {"hoverinfo": "skip", "hovertemplate": None, "showlegend": False, "opacity": 0.35}
    name, shape = label(group.name, 100), {"width": 1, "dash": group.dash}
    return line(f"{name}, seed {seed}", *curve, group.colour, legendgroup=name, line=shape, **faint)


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
    styles, spreads = styles_of(document), [row[key]["std"] or 0.0 for row in rows]
    names = [row["contender"] + (" (composed)" if row["how"] == COMPOSED else "") for row in rows]
    shown = ["<br>".join(map(label, break_name(name))) for name in names]
    colours = [styles[row["contender"]][0] for row in rows]
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
    for name, (colour, dash) in styles_of(document).items():
        own = sorted((row for row in rows if row["contender"] == name), key=lambda row: link_rate(row["link"]))
        points = {link_rate(row["link"]) / 1e6: row["seconds"]["mean"] for row in own}
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
