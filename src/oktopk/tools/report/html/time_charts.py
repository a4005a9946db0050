"""Charts of the time of a step: over the steps, and per phase with the worker thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..analysis.times import GROUPS, STAGES, WORK
from . import colours
from .drawing import DIGITS, Chart, Trace, describe_window, figure, line, transition
from .smoothing import roll, window


def time_of_steps(run: Mapping[str, Any]) -> Chart | None:
    """The rolling median of each part of a step, stacked; one slow step does not hide the others."""
    series = run["series"]
    if not any(any(values) for values in series["seconds"].values()):
        return None
    width = window(len(series["step"]))
    traces = [_stack_group(group, series, width) for group in GROUPS]
    totals = _sums(list(series["seconds"].values()))
    if width > 1:
        single = {"opacity": 0.45, "line": {"width": 1}}
        traces.append(line("single steps", series["step"], _milliseconds(totals), colours.GREY, "ms", **single))
    if any(series["hidden_seconds"]):
        hidden = _milliseconds(roll(series["hidden_seconds"], width, median, series["phase"]))
        name = "hidden behind backward, not in the stack"
        traces.append(line(name, series["step"], hidden, colours.GREY, "ms", line={"dash": "dot"}))
    caption = (
        "The stack is the step of rank 0, with the exposed part of the reductions, which training waited for; "
        "what ran during backward is hidden and not in it."
    )
    caption += describe_window(series, "rolling median").replace("Thick", "Areas")
    shown = figure(traces, "step", "time per step (ms)", **transition(run))
    if top := _without_outliers([total for total in totals if total is not None]):
        shown["layout"]["yaxis"]["range"] = [0, 1e3 * top]
        caption += " Single steps that are far slower exceed the axis: zoom out to see them."
    return Chart("time", "Time per step", caption, shown)


def _stack_group(group: str, series: Mapping[str, Any], width: int) -> Trace:
    colour = colours.GROUP[group]
    seconds = roll(_sums([series["seconds"][stage] for stage in GROUPS[group]]), width, median, series["phase"])
    area = {"stackgroup": "step", "line": {"width": 0}, "fillcolor": colour}
    return line(colours.GROUP_NAME[group], series["step"], _milliseconds(seconds), colour, "ms", **area)


def _sums(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The sum of each point; None where nothing is known."""
    points = zip(*columns, strict=True)
    return [sum(known) if (known := [x for x in point if x is not None]) else None for point in points]


def _without_outliers(totals: Sequence[float]) -> float | None:
    """The end of the axis if a few points are far above all others.

    >>> _without_outliers([1.0] * 95 + [9.0]), _without_outliers([1.0, 2.0, 3.0])
    (1.2, None)
    """
    usual = sorted(totals)[int(0.95 * (len(totals) - 1))]
    return 1.2 * usual if max(totals) > 1.5 * usual > 0 else None


def _milliseconds(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{1e3 * value:.5g}") for value in values]


def time_of_phases(run: Mapping[str, Any]) -> Chart | None:
    """Two bars per phase on one time axis: the step, and the worker thread."""
    timed = {name: means for name, means in run["phases"].items() if means["seconds"]}
    if not timed:
        return None
    bars = [bar for name, means in timed.items() for bar in _bars_of_phase(name, means)]
    traces = []
    for stage in STAGES:
        for hidden in (False, True):
            ours = [bar for bar in bars if bar[1:3] == (stage, hidden)]
            if ours:
                traces.append(_bar_trace(stage, hidden, ours))
    caption = (
        "Means over the steps of a phase but its first. Hatched work of the worker thread ran during backward and "
        "is hidden; the step waited for solid work, which is exposed. The two bars of a phase share one time axis."
    )
    shown = figure(traces, "time (ms)", "", barmode="overlay", bargap=0.25)
    shown["layout"] |= {"hovermode": "closest"}
    order = [row for name in timed for row in (f"{name}: worker", f"{name}: step")]
    shown["layout"]["yaxis"] |= {"categoryorder": "array", "categoryarray": order[::-1]}
    return Chart("phases", "Time per step, hidden and exposed", caption, shown)


Bar = tuple[str, str, bool, float, float]
"""Row, stage, whether hidden, start and length in seconds."""


def _bars_of_phase(name: str, means: Mapping[str, Any]) -> list[Bar]:
    seconds, hidden = means["seconds"], means["hidden_seconds"]
    handed_over = seconds["forward"] + seconds["backward"]
    step = [(f"{name}: step", stage, False, seconds[stage]) for stage in STAGES]
    worker = [(f"{name}: worker", stage, True, hidden[stage]) for stage in WORK]
    worker += [(f"{name}: worker", stage, False, seconds[stage]) for stage in WORK]
    return [*_lay_out(step, 0.0), *_lay_out(worker, max(0.0, handed_over - sum(hidden.values())))]


def _lay_out(parts: Sequence[tuple[str, str, bool, float]], start: float) -> list[Bar]:
    bars = []
    for row, stage, hidden, length in parts:
        bars.append((row, stage, hidden, start, length))
        start += length
    return bars


def _bar_trace(stage: str, hidden: bool, bars: Sequence[Bar]) -> Trace:
    marker: dict[str, Any] = {"color": colours.STAGE[stage], "line": {"width": 0}}
    if hidden:
        marker["pattern"] = {"shape": "/", "fillmode": "replace", "fgcolor": colours.STAGE[stage]}
    name = colours.STAGE_NAME[stage]
    what = f"{name}, hidden" if hidden else name
    return {
        "type": "bar", "orientation": "h", "name": name, "legendgroup": stage, "showlegend": not hidden,
        "y": [bar[0] for bar in bars], "base": _milliseconds([bar[3] for bar in bars]),
        "x": _milliseconds([bar[4] for bar in bars]), "marker": marker,
        "customdata": _milliseconds([bar[4] for bar in bars]),  # x is where a bar ends
        "hovertemplate": f"%{{y}}: {what}, %{{customdata:{DIGITS}}} ms<extra></extra>",
    }  # fmt: skip
