"""The charts of one run: figures for plotly.js, made of the document alone.

Texts of a run go through `label`, because plotly understands some HTML in them.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import colours
from .times import STAGES, WORK
from .units import size_text

Trace = dict[str, Any]
LONGEST_LABEL = 40


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    caption: str
    figure: dict[str, Any]


def label(text: object) -> str:
    """
    >>> label("<a href='x'>")
    "&lt;a href='x'&gt;"
    """
    short = str(text)
    return html.escape(short if len(short) <= LONGEST_LABEL else short[: LONGEST_LABEL - 1] + "…", quote=False)


def figure(data: Sequence[Trace], x: str, y: str, log: bool = False, **more: Any) -> dict[str, Any]:
    yaxis = {"title": {"text": y}, "automargin": True} | (
        {"type": "log", "dtick": 1} if log else {"rangemode": "tozero"}
    )
    layout = {
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": yaxis,
        "hovermode": "x unified",
        "uirevision": "keep",  # a zoom outlasts new data
        **more,
    }
    return {"data": list(data), "layout": layout}


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, unit: str = "", **more: Any) -> Trace:
    shape = {"color": colour, "width": 2} | more.pop("line", {})
    hover = f"%{{y:.4g}}{unit and ' ' + unit}"
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": shape,
            "hovertemplate": hover} | more  # fmt: skip


def spread(name: str, x: Sequence[Any], of: Mapping[str, Any], colour: str, unit: str = "") -> list[Trace]:
    """The mean, and where single steps differ from it the area from the lowest to the highest."""
    mean = line(name, x, of["mean"], colour, unit)
    if of["low"] == of["high"]:
        return [mean]
    edge = {
        "hoverinfo": "skip",
        "hovertemplate": None,
        "showlegend": False,
        "legendgroup": name,
        "line": {"width": 0},
    }
    low = line(f"{name}, lowest", x, of["low"], colour, **edge)
    high = line(f"{name}, highest", x, of["high"], colour, **edge, fill="tonexty", fillcolor=colours.faint(colour))
    return [low, high, mean | {"legendgroup": name}]


def known(values: Sequence[Any]) -> bool:
    return any(value is not None for value in values)


def transition(run: Mapping[str, Any]) -> dict[str, Any]:
    """A line where the sparse phase begins, to be added to a layout."""
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
        "text": f"sparse from step {begin}",
    }
    return {"shapes": [shape], "annotations": [note]}


def charts(run: Mapping[str, Any]) -> list[Chart]:
    """Those that there are values for."""
    made = [
        _loss(run),
        _validation(run),
        _density(run),
        _bytes(run),
        _time(run),
        _phase_time(run),
        *(_messages(run, phase) for phase in ("dense", "sparse")),
        _thresholds(run),
        _residual(run),
    ]
    return [chart for chart in made if chart is not None]


def _loss(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    traces = (
        spread("training loss", series["step"], series["loss"], colours.LOSS)
        if known(series["loss"]["mean"])
        else []
    )
    name = "val loss"
    points = [(one["step"], one["figures"][name]) for one in run["validations"] if name in one["figures"]]
    if points:
        x, y = zip(*points, strict=True)
        mark = {"size": 9, "symbol": "diamond"}
        traces.append(line("validation loss", x, y, colours.VALIDATION, mode="lines+markers", marker=mark))
    skipped = [one["step"] for one in run["skipped"]["listed"]]
    if skipped and traces:
        mark = {"symbol": "x", "size": 9, "color": colours.SKIPPED}
        traces.append({"type": "scatter", "mode": "markers", "name": "skipped step", "x": skipped,
                       "y": [0] * len(skipped), "marker": mark, "hovertemplate": "not finite"})  # fmt: skip
    if not traces:
        return None
    caption = "Training: mean over all ranks. Validation: at the end of an epoch."
    shown = figure(traces, "step", "loss", **transition(run))
    if not skipped:
        shown["layout"]["yaxis"].pop("rangemode")
    return Chart("loss", "Loss", caption, shown)


def _validation(run: Mapping[str, Any]) -> Chart | None:
    """All that was validated besides the loss."""
    names = dict.fromkeys(name for one in run["validations"] for name in one["figures"] if name != "val loss")
    traces = []
    for place, name in enumerate(list(names)[:8]):
        points = [(one["step"], one["figures"][name]) for one in run["validations"] if name in one["figures"]]
        x, y = zip(*points, strict=True)
        colour, dash = colours.of_series(place + 1)
        marks = {"mode": "lines+markers", "line": {"dash": dash}, "marker": {"size": 8}}
        traces.append(line(label(name), x, y, colour, **marks))
    if not traces:
        return None
    title = "value" if len(traces) > 1 else label(next(iter(names)))
    caption = "Error rates (WER, CER) are shares of the words or letters and may exceed 1."
    caption = (
        caption if any("ER" in name for name in names) else "At the end of an epoch, over all validation data."
    )
    return Chart("validation", "Validation", caption, figure(traces, "step", title, **transition(run)))


def _density(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    if not known(series["local_density"]["mean"]):
        return None
    x, share = (
        series["step"],
        [
            ("result", [_percent(value) for value in series["global_density"]], colours.GLOBAL, "dot"),
            ("asked for", [_percent(value) for value in series["target_density"]], colours.ASKED, "dash"),
        ],
    )
    local = {key: [_percent(value) for value in values] for key, values in series["local_density"].items()}
    traces = spread("sent by rank 0", x, local, colours.LOCAL, "%")
    traces += [line(name, x, values, colour, "%", line={"dash": dash}) for name, values, colour, dash in share]
    caption = "Share of the gradient's entries that rank 0 sent, that were asked for, and that the result has."
    return Chart("density", "Density", caption, figure(traces, "step", "density (%)", log=True, **transition(run)))


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _bytes(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    if not any(series["sent_bytes"]["mean"]):
        return None
    limits = [
        ("dense (ring)", "dense_bytes", colours.RING, "dash"),
        ("6k words", "bound_6k_bytes", colours.SIX_K, "dot"),
        ("2k words", "bound_2k_bytes", colours.TWO_K, "dashdot"),
    ]
    traces = spread("sent by rank 0", series["step"], series["sent_bytes"], colours.SENT, "B")
    traces += [
        line(name, series["step"], series[key], colour, "B", line={"dash": dash})
        for name, key, colour, dash in limits
        if known(series[key])
    ]
    caption = (
        "Bytes that rank 0 sent in a step, headers and control included. Dense is what a ring sends (modelled: the "
        "inside of a library's all-reduce cannot be seen). 6k(P−1)/P words are Ok-Topk's bound, 2k(P−1)/P the least "
        "for plain indices and values; coded indices can go below it. A word has 4 bytes."
    )
    shown = figure(traces, "step", "bytes per step (B)", log=True, **transition(run))
    shown["layout"]["yaxis"] |= {"exponentformat": "SI"}
    return Chart("bytes", "Bytes on the wire", caption, shown)


def _time(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    if not any(any(values) for values in series["seconds"].values()):
        return None
    traces = [
        line(
            *(colours.STAGE_NAME[stage], series["step"], _milliseconds(series["seconds"][stage])),
            *(colours.STAGE[stage], "ms"),
            **{"stackgroup": "step", "line": {"width": 0}, "fillcolor": colours.STAGE[stage]},
        )
        for stage in STAGES
    ]
    if any(series["hidden_seconds"]):
        hidden = _milliseconds(series["hidden_seconds"])
        name = "hidden beside backward, not in the stack"
        traces.append(line(name, series["step"], hidden, colours.GREY, "ms", line={"dash": "dot"}))
    caption = (
        "The stack is the step of rank 0. Stages of reductions are in it as far as they were exposed, that is, "
        "training waited for them after backward."
    )
    return Chart("time", "Time per step", caption, figure(traces, "step", "time per step (ms)", **transition(run)))


def _milliseconds(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{1e3 * value:.5g}") for value in values]


def _phase_time(run: Mapping[str, Any]) -> Chart | None:
    """For each phase two bars on one clock: the step, and the worker thread beside it."""
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
        "Means over the steps of a phase. Hatched work of the worker thread ran beside backward and is hidden; solid "
        "work is what the step waited for. The two bars of a phase share their clock."
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
    return [*_laid_out(step, 0.0), *_laid_out(worker, max(0.0, handed_over - sum(hidden.values())))]


def _laid_out(parts: Sequence[tuple[str, str, bool, float]], start: float) -> list[Bar]:
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
    return {
        "type": "bar", "orientation": "h", "name": name, "legendgroup": stage, "showlegend": not hidden,
        "y": [bar[0] for bar in bars], "base": _milliseconds([bar[3] for bar in bars]),
        "x": _milliseconds([bar[4] for bar in bars]), "marker": marker,
        "hovertemplate": f"%{{y}}: {name}{', hidden' if hidden else ''}, %{{x:.4g}} ms<extra></extra>",
    }  # fmt: skip


def _messages(run: Mapping[str, Any], phase: str) -> Chart | None:
    """Counts per step, by size. The colour of a kind of messages is the same in both phases."""
    kinds = list(dict.fromkeys((kind["operation"], kind["stage"]) for kind in run["messages"]))
    ours = [kind for kind in run["messages"] if kind["phase"] == phase and kind["sizes"]]
    if not ours:
        return None
    powers = sorted({int(power) for kind in ours for power in kind["sizes"]})
    powers = list(range(powers[0], powers[-1] + 1))
    steps = run["phases"][phase]["steps"]
    traces = []
    for kind in ours:
        colour, _ = colours.of_series(kinds.index((kind["operation"], kind["stage"])))
        sizes = {int(power): count / steps for power, count in kind["sizes"].items()}
        pattern = "/" if kind["modelled"] else "." if kind["control"] else ""
        name = f"{kind['operation']}, {kind['stage']}"
        more = ", modelled" * kind["modelled"] + ", control" * kind["control"]
        marker = {
            "color": colour,
            "pattern": {"shape": pattern, "fillmode": "replace", "fgcolor": colour} if pattern else {},
        }
        traces.append({
            "type": "bar", "name": label(name) + more, "x": [size_text(power) for power in powers],
            "y": [sizes.get(power) for power in powers], "marker": marker, "hovertemplate": "%{y:.3g} per step",
        })  # fmt: skip
    caption = (
        f"Messages that rank 0 sent in a {phase} step, by size: “4 KiB” are those from 4 KiB to below 8 KiB. Hatched: "
        "modelled as a ring; dotted: control."
    )
    shown = figure(traces, "size of a message", "messages per step", barmode="stack")
    shown["layout"]["xaxis"] |= {"type": "category"}
    return Chart(f"messages-{phase}", f"Message sizes, {phase} phase", caption, shown)


def _thresholds(run: Mapping[str, Any]) -> Chart | None:
    series, traces = run["series"], []
    for place, bucket in enumerate(series["thresholds"]):
        dash = {"dash": colours.DASHES[place % len(colours.DASHES)]}
        for name, colour in (("local", colours.LOCAL), ("global", colours.GLOBAL)):
            if any(bucket[name]):
                of = f"{name}, bucket {bucket['bucket']}"
                traces.append(line(of, series["step"], bucket[name], colour, line=dash))
    if not traces:
        return None
    caption = (
        "Entries of gradient plus residual are sent when their magnitude reaches the local threshold of rank 0, and "
        "stay in the result when their sum reaches the global one. In units of the gradient."
    )
    shown = figure(traces, "step", "threshold (gradient units)", log=True, **transition(run))
    return Chart("thresholds", "Thresholds", caption, shown)


def _residual(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    if not known(series["residual_norm"]):
        return None
    trace = line("residual of rank 0", series["step"], series["residual_norm"], colours.RESIDUAL, connectgaps=True)
    caption = "Norm of what rank 0 has not sent yet; large buckets measure it every 16 steps."
    shown = figure([trace], "step", "L2 norm (gradient units)", **transition(run))
    return Chart("residual", "Residual norm", caption, shown)
