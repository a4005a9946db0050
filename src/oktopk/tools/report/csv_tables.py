"""The data of every chart as a CSV file, for other programs that draw."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from oktopk.utils.files import write_atomically

from .html.charts import make_charts
from .html.comparison import make_comparison
from .html.drawing import Chart

FINALS = "finals.csv"
_PLAIN = re.compile(r"[^\w.+-]+")


def write_tables(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write a file for each chart; returns their paths.

    One run: NAME.csv. Several runs: NAME.csv for what compares them, finals.csv with a row for each, and a folder
    for each run.
    """
    runs = document["runs"]
    if len(runs) == 1:
        return _write_charts(make_charts(runs[0]), folder)
    paths = [*_write_charts(make_comparison(runs), folder), folder / FINALS]
    write_atomically(folder / FINALS, _text(_finals(document["finals"])))
    for place, run in enumerate(runs):
        own = folder / f"{place}-{_PLAIN.sub('-', run['name']).strip('-.')}"
        paths += _write_charts(make_charts(run), own)
    return paths


def _write_charts(charts: Iterable[Chart], folder: Path) -> list[Path]:
    paths = []
    for chart in charts:
        paths.append(folder / f"{chart.name}.csv")
        write_atomically(paths[-1], _text(chart_rows(chart)))
    return paths


def chart_rows(chart: Chart) -> list[list[Any]]:
    """A chart as rows: a header, and each point of each series with the values of both axes.

    >>> line = {"type": "scatter", "name": "loss &lt;1", "x": [0, 1, 2], "y": [3.0, None, 1.0]}
    >>> axes = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "loss"}}}
    >>> chart_rows(Chart("loss", "Loss", "", {"data": [line], "layout": axes}))
    [['series', 'step', 'loss'], ['loss <1', 0, 3.0], ['loss <1', 2, 1.0]]
    """
    layout = chart.figure["layout"]
    x, y = (layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
    if any(trace.get("orientation") == "h" for trace in chart.figure["data"]):
        rows: list[list[Any]] = [["series", "hidden", "row", f"start of {x}", f"length of {x}"]]
        for trace in chart.figure["data"]:
            hidden = "pattern" in trace["marker"]
            bars = zip(trace["y"], trace["base"], trace["x"], strict=True)
            rows += [[unescape(trace["name"]), hidden, *bar] for bar in bars]
        return rows
    rows = [["series", x, unescape(y)]]
    for trace in chart.figure["data"]:
        points = zip(trace["x"], trace["y"], strict=True)
        rows += [[unescape(trace["name"]), *point] for point in points if point[1] is not None]
    return rows


def _finals(finals: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    flat = [{**{name: one[name] for name in one if name != "validation"}, **one["validation"]} for one in finals]
    names = list(dict.fromkeys(name for one in flat for name in one))
    return [names, *([one.get(name) for name in names] for one in flat)]


def _text(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "replace")
