"""Parts of charts: figures for plotly.js.

Texts from a run are escaped with `label`, because plotly interprets some HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import colours
from .smoothing import roll, window

Trace = dict[str, Any]
LONGEST_LABEL = 40
DIGITS = ",.4~r"
"""Four digits, without exponent."""


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    caption: str
    figure: dict[str, Any]


def label(text: object, longest: int = LONGEST_LABEL) -> str:
    """
    >>> label("<a href='x'>")
    "&lt;a href='x'&gt;"
    """
    short = str(text)
    return html.escape(short if len(short) <= longest else short[: longest - 1] + "…", quote=False)


def figure(data: Sequence[Trace], x: str, y: str, log: bool = False, **more: Any) -> dict[str, Any]:
    """A figure; if `log` is given as True, readers can switch to a linear axis, and back."""
    kind = {"type": "log"} if log else {"rangemode": "tozero"}
    title = {"text": y, "standoff": 10}
    yaxis = {"title": title, "automargin": True, "exponentformat": "none", "separatethousands": True} | kind
    layout = {
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": yaxis,
        "hovermode": "x unified",
        "uirevision": "keep",  # a zoom outlasts new data
        "meta": {"scales": log},
        **more,
    }
    return {"data": list(data), "layout": layout}


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, unit: str = "", **more: Any) -> Trace:
    shape = {"color": colour, "width": 2} | more.pop("line", {})
    hover = f"%{{y:{DIGITS}}}{unit and ' ' + unit}"
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": shape,
            "hovertemplate": hover} | more  # fmt: skip


def spread(name: str, x: Sequence[Any], of: Mapping[str, Any], colour: str, unit: str = "") -> list[Trace]:
    """The mean, and the area from lowest to highest where steps differ."""
    mean = line(name, x, of["mean"], colour, unit)
    if of["low"] == of["high"]:
        return [mean]
    edge: dict[str, Any] = {
        "hoverinfo": "skip",
        "hovertemplate": None,
        "showlegend": False,
        "legendgroup": name,
        "line": {"width": 0},
    }
    low = line(f"{name}, lowest", x, of["low"], colour, **edge)
    high = line(f"{name}, highest", x, of["high"], colour, **edge, fill="tonexty", fillcolor=colours.faint(colour))
    return [low, high, mean | {"legendgroup": name}]


def smoothed(name: str, x: Sequence[Any], of: Mapping[str, Any], colour: str, parts: Sequence[str]) -> list[Trace]:
    """The values, faint, and their rolling mean; short curves are shown as they are."""
    width, traces = window(len(x)), spread(name, x, of, colour)
    if width == 1:
        return traces
    traces[-1] |= {"opacity": 0.35, "line": {"color": colour, "width": 1}}
    return [*traces, line("rolling mean", x, roll(of["mean"], width, parts=parts), colour, line={"width": 2.5})]


def is_positive(values: Iterable[float | None]) -> bool:
    """Whether a logarithmic axis can show all values that are known."""
    return all(value is None or value > 0 for value in values)


def known(values: Sequence[Any]) -> bool:
    return any(value is not None for value in values)


def transition(run: Mapping[str, Any]) -> dict[str, Any]:
    """Layout entries that mark the start of the sparse phase."""
    begin = run["first_sparse_step"]
    if begin is None:
        return {}
    at = begin - 0.5
    grey = {"color": colours.GREY, "width": 1, "dash": "dash"}
    shape = {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": grey}
    note = {
        "x": at,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "xanchor": "left" if begin <= (run["series"]["step"] or [0])[-1] / 2 else "right",
        "font": {"size": 11},
        "text": f"sparse from step {begin:,}",
    }
    return {"shapes": [shape], "annotations": [note]}


def describe_window(series: Mapping[str, Any], what: str = "rolling mean") -> str:
    """The sentence about smoothing of a chart over steps; empty if its curves are shown as they are."""
    width = window(len(series["step"]))
    return "" if width == 1 else f" Thick: {what} over {width * series['steps_per_point']:,} steps."
