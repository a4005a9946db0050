"""Charts that compare runs: one line for each setting, the mean over its seeds with their range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .colours import faint
from .drawing import DIGITS, Chart, Trace, figure, is_positive, known, label, line, spread
from .groups import Group, Runs, group_runs
from .smoothing import Curve, bundle, roll, window

_BAND = 0.13
"""Bands of several settings overlap."""
_HOVER = {
    "seconds": f"loss %{{y:{DIGITS}}} after %{{x:{DIGITS}}} s",
    "bytes": f"loss %{{y:{DIGITS}}} after %{{x:.4~s}}B",
}


def make_comparison(runs: Runs) -> list[Chart]:
    groups = group_runs(runs)
    made = [
        _losses(groups, "steps", "Loss against steps", "step", "step", "Mean over all ranks."),
        _losses(
            *(groups, "seconds", "Loss against time", "elapsed_seconds", "time in training steps (s)"),
            "Seconds in steps of rank 0; validation and checkpoints are not counted.",
        ),
        _losses(
            *(groups, "bytes", "Loss against bytes", "sent_so_far_bytes", "bytes sent by rank 0 so far (B)"),
            "All bytes that rank 0 sent in reductions, warm-up included. Both axes are logarithmic.",
        ),
        _validations(groups),
    ]
    return [chart for chart in made if chart is not None]


def _losses(groups: Sequence[Group], name: str, title: str, column: str, x: str, caption: str) -> Chart | None:
    traces: list[Trace] = []
    for group in groups:
        curves = [_loss_curve(run, column, name == "bytes") for run in group.runs]
        traces += draw_group(group, [curve for curve in curves if curve], name == "bytes", _HOVER.get(name))
    if not traces:
        return None
    drawn = [value for trace in traces for value in trace["y"]]
    shown = figure(traces, x, "training loss", log=is_positive(drawn))
    shown["layout"]["yaxis"].pop("rangemode", None)
    if name == "bytes":
        shown["layout"]["xaxis"] |= {"type": "log", "exponentformat": "SI"}
    if name != "steps":  # the runs share no x values
        shown["layout"]["hovermode"] = "closest"
    return Chart(f"loss-{name}", title, f"Rolling means.{describe_bands(groups)} {caption}", shown)


def _loss_curve(run: Mapping[str, Any], column: str, positive: bool) -> Curve | None:
    """The smoothed loss of a run against a column of its series."""
    series = run["series"]
    if not known(series["loss"]["mean"]) or not any(series[column]):
        return None
    means = roll(series["loss"]["mean"], window(len(series["step"])))
    points = [(x, y) for x, y in zip(series[column], means, strict=True) if y is not None and (x or not positive)]
    return ([x for x, _ in points], [y for _, y in points]) if points else None


def draw_group(group: Group, curves: Sequence[Curve], geometric: bool = False, hover: str | None = None,
               **more: Any) -> list[Trace]:  # fmt: skip
    """A line with the range over seeds behind it; curves that share no x are drawn one by one."""
    name = label(group.name, 100)
    look: dict[str, Any] = {"line": {"dash": group.dash}, "legendgroup": name, **more}
    if hover is not None:
        look["hovertemplate"] = hover
    joint = bundle(curves, geometric) if len(curves) > 1 else None
    if joint is None or not joint["x"]:
        return [
            line(name, x, y, group.colour, **look, showlegend=place == 0) for place, (x, y) in enumerate(curves)
        ]
    *edges, mean = spread(name, joint["x"], joint, group.colour)
    for edge in edges[1:]:
        edge["fillcolor"] = faint(group.colour, _BAND)
    mean |= look | {"line": mean["line"] | look["line"]}
    return [*edges, mean]


def describe_bands(groups: Sequence[Group]) -> str:
    return " Bands: lowest to highest seed." if any(len(group.runs) > 1 for group in groups) else ""


def compared_metric(runs: Runs) -> str | None:
    """The validation metric to compare runs by: the one they name, the first besides the loss, or the loss."""
    names = dict.fromkeys(name for run in runs for one in run["validations"] for name in one["figures"])
    named = next((run["about"]["metric"] for run in runs if run["about"]["metric"] in names), None)
    other = next((name for name in names if name != "val loss"), next(iter(names), None))
    return named if isinstance(named, str) else other


def _validations(groups: Sequence[Group]) -> Chart | None:
    name = compared_metric([run for group in groups for run in group.runs])
    traces: list[Trace] = []
    marks: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 8}}
    for group in groups:
        curves = [_validation_curve(run, name) for run in group.runs]
        traces += draw_group(group, [curve for curve in curves if curve[0]], **marks)
    if not traces:
        return None
    shown = figure(traces, "step", label(name))
    shown["layout"]["yaxis"].pop("rangemode")
    return Chart("validations", "Validation", f"{name}, at the end of epochs.{describe_bands(groups)}", shown)


def _validation_curve(run: Mapping[str, Any], name: str | None) -> Curve:
    points = [(one["step"], one["figures"][name]) for one in run["validations"] if name in one["figures"]]
    return [x for x, _ in points], [y for _, y in points]
