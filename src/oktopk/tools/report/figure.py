"""The charts of the page as one picture for a paper: SVG, PDF or PNG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.utils.files import atomic_path

from .html.charts import make_charts
from .html.comparison import make_comparison
from .html.drawing import Chart, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS, _WIDTH, _HEIGHT = 2, 5.6, 3.3
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {"diamond": "D", "x": "x"}
_HATCHES = {"/": "////", ".": "....", "": ""}
_MOST_LABELS = 8


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw the charts of a run, or those that compare several, to a file; its suffix selects the format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = document["runs"]
    charts = make_charts(runs[0]) if len(runs) == 1 else make_comparison(runs)
    rows = max(1, -(-len(charts) // _COLUMNS))
    with rc_context({"svg.hashsalt": "oktopk", "svg.fonttype": "none"}):  # the same file for the same runs
        figure = Figure((_COLUMNS * _WIDTH, rows * _HEIGHT), layout="constrained")
        panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
        for panel, chart in zip(panels, charts, strict=False):
            _draw_chart(panel, chart)
        for panel in panels[len(charts) :]:
            panel.set_axis_off()
        figure.suptitle(_plain(runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"), fontsize=11)
        kind = path.suffix.lstrip(".")
        with atomic_path(path) as draft:
            figure.savefig(draft, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)


def _draw_chart(panel: Axes, chart: Chart) -> None:
    traces, layout = chart.figure["data"], chart.figure["layout"]
    stacked = [trace for trace in traces if "stackgroup" in trace]
    if stacked:
        _draw_stack(panel, stacked)
    rows, heights = layout["yaxis"].get("categoryarray", []), dict[str, float]()
    before: Trace = {}
    for trace in traces:
        if trace["type"] == "bar":
            _draw_bars(panel, trace, rows, heights)
        elif "stackgroup" not in trace:
            _draw_line(panel, trace, before)
        before = trace
    _set_axes(panel, layout)
    panel.set_title(_plain(chart.title), fontsize=10)
    handles, names = panel.get_legend_handles_labels()
    if len(names) > 1:
        panel.legend(handles[:_MOST_LABELS], names[:_MOST_LABELS], fontsize=6.5, frameon=False)


def _draw_line(panel: Axes, trace: Trace, before: Trace) -> None:
    """Draw a line, or the area between it and the trace before."""
    style = trace.get("line", {})
    if trace.get("fill") == "tonexty":
        low, high = (_numbers(one["y"]) for one in (before, trace))
        panel.fill_between(trace["x"], low, high, color=style.get("color"), alpha=0.2, linewidth=0)
    if style.get("width") == 0:
        return
    mode, marker = trace["mode"], trace.get("marker", {})
    points = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
    x, y = (
        ([x for x, _ in points], [y for _, y in points])
        if trace.get("connectgaps")
        else (list(trace["x"]), _numbers(trace["y"]))
    )
    panel.plot(
        x, y,
        color=style.get("color") or marker.get("color"),
        linestyle=_DASHES[style.get("dash", "solid")] if "lines" in mode else "none",
        marker=_MARKERS.get(marker.get("symbol", ""), "o") if "markers" in mode else None,
        markersize=4, linewidth=1.2, label=_plain(trace["name"]),
    )  # fmt: skip


def _draw_stack(panel: Axes, traces: Sequence[Trace]) -> None:
    values = [[0.0 if y is None else y for y in trace["y"]] for trace in traces]
    panel.stackplot(
        traces[0]["x"], *values,
        colors=[trace["line"]["color"] for trace in traces], labels=[_plain(trace["name"]) for trace in traces],
    )  # fmt: skip


def _draw_bars(panel: Axes, trace: Trace, rows: Sequence[str], heights: dict[str, float]) -> None:
    """Draw bars: in rows, or upright, where those of the same place are stacked, as `heights` remembers."""
    look = {
        "color": trace["marker"]["color"],
        "hatch": _HATCHES[trace["marker"].get("pattern", {}).get("shape", "")],
        "edgecolor": "white",
        "linewidth": 0.3,
        "label": _plain(trace["name"]) if trace.get("showlegend", True) else None,
    }
    if trace.get("orientation") == "h":
        places = [rows.index(row) for row in trace["y"]]
        panel.barh(places, _numbers(trace["x"]), left=_numbers(trace["base"]), **look)
        return
    values = [0.0 if y is None else y for y in trace["y"]]
    panel.bar(trace["x"], values, bottom=[heights.get(x, 0.0) for x in trace["x"]], **look)
    for x, value in zip(trace["x"], values, strict=True):
        heights[x] = heights.get(x, 0.0) + value


def _set_axes(panel: Axes, layout: Mapping[str, Any]) -> None:
    xaxis, yaxis = layout["xaxis"], layout["yaxis"]
    panel.set_xlabel(_plain(xaxis["title"]["text"]), fontsize=8)
    panel.set_ylabel(_plain(yaxis["title"]["text"]), fontsize=8)
    if xaxis.get("type") == "log":
        panel.set_xscale("log")
    if yaxis.get("type") == "log":
        panel.set_yscale("log")
    elif yaxis.get("rangemode") == "tozero":
        panel.set_ylim(bottom=0)
    if "range" in yaxis:
        panel.set_ylim(*yaxis["range"])
    if xaxis.get("type") == "category":
        panel.tick_params(axis="x", rotation=45)
    if "categoryarray" in yaxis:
        rows = yaxis["categoryarray"]
        panel.set_yticks(range(len(rows)), rows)
        panel.set_ylim(-0.6, len(rows) - 0.4)
    for shape in layout.get("shapes", ()):
        panel.axvline(shape["x0"], color=shape["line"]["color"], linestyle="--", linewidth=0.8)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _plain(text: str) -> str:
    """A text without HTML, and without what matplotlib takes for formulas."""
    return unescape(text).replace("$", r"\$")
