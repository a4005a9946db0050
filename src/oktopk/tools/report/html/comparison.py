"""Charts that compare runs; each run has one colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import colours
from .drawing import DIGITS, Chart, Trace, figure, known, label, line

Runs = Sequence[Mapping[str, Any]]
_HOVER = {
    "seconds": {"hovertemplate": f"loss %{{y:{DIGITS}}} after %{{x:{DIGITS}}} s"},
    "bytes": {"hovertemplate": f"loss %{{y:{DIGITS}}} after %{{x:.4~s}}B"},
}


def make_comparison(runs: Runs) -> list[Chart]:
    made = [
        _losses(runs, "steps", "Loss against steps", "step", "step", "Mean over all ranks."),
        _losses(
            *(runs, "seconds", "Loss against time", "elapsed_seconds", "time in training steps (s)"),
            "Seconds in steps of rank 0; validation and checkpoints are not counted.",
        ),
        _losses(
            *(runs, "bytes", "Loss against bytes", "sent_so_far_bytes", "bytes sent by rank 0 so far (B)"),
            "All bytes that rank 0 sent in reductions, warm-up included. The axis is logarithmic.",
        ),
        _validations(runs),
    ]
    return [chart for chart in made if chart is not None]


def _losses(runs: Runs, name: str, title: str, column: str, x: str, caption: str) -> Chart | None:
    traces = []
    for place, run in enumerate(runs):
        series = run["series"]
        if known(series["loss"]["mean"]) and any(series[column]):
            traces.append(_draw_run(place, run, series[column], series["loss"]["mean"], **_HOVER.get(name, {})))
    if not traces:
        return None
    shown = figure(traces, x, "training loss")
    shown["layout"]["yaxis"].pop("rangemode")
    if name == "bytes":
        shown["layout"]["xaxis"] |= {"type": "log", "exponentformat": "SI"}
    if name != "steps":  # the runs share no x values
        shown["layout"]["hovermode"] = "closest"
    return Chart(f"loss-{name}", title, caption, shown)


def _draw_run(place: int, run: Mapping[str, Any], x: Sequence[Any], y: Sequence[Any], **more: Any) -> Trace:
    colour, dash = colours.series_style(place)
    return line(label(run["name"]), x, y, colour, line={"dash": dash}, **more)


def _validations(runs: Runs) -> Chart | None:
    """Compare the first validation metric besides the loss, or else the loss."""
    names = dict.fromkeys(name for run in runs for one in run["validations"] for name in one["figures"])
    name = next((name for name in names if name != "val loss"), next(iter(names), None))
    traces = []
    for place, run in enumerate(runs):
        points = [(one["step"], one["figures"][name]) for one in run["validations"] if name in one["figures"]]
        if points:
            x, y = zip(*points, strict=True)
            traces.append(_draw_run(place, run, x, y, mode="lines+markers", marker={"size": 8}))
    if not traces:
        return None
    shown = figure(traces, "step", label(name))
    shown["layout"]["yaxis"].pop("rangemode")
    return Chart("validations", "Validation", f"{name}, at the end of epochs.", shown)
