"""The charts of one run, made from the report document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.metrics.events import SPARSE

from ..units import format_size
from . import colours
from .drawing import (
    DIGITS,
    Chart,
    describe_window,
    figure,
    is_positive,
    known,
    label,
    line,
    smoothed,
    spread,
    transition,
)
from .time_charts import time_of_phases, time_of_steps


def make_charts(run: Mapping[str, Any]) -> list[Chart]:
    """Make the charts that have data."""
    return [*main_charts(run), *inner_charts(run)]


def main_charts(run: Mapping[str, Any]) -> list[Chart]:
    """Quality, bytes and time: what every reader looks at."""
    made = [_loss(run), _validation(run), _bytes(run), _density(run), time_of_steps(run), time_of_phases(run)]
    return [chart for chart in made if chart is not None]


def inner_charts(run: Mapping[str, Any]) -> list[Chart]:
    """Messages, thresholds and the residual: what the algorithm did."""
    made = [
        *(_messages(run, phase) for phase in ("dense", "sparse")),
        _thresholds(run),
        _residual(run),
    ]
    return [chart for chart in made if chart is not None]


def _loss(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    losses = series["loss"]["mean"]
    traces = (
        smoothed("training loss", series["step"], series["loss"], colours.LOSS, parts=series["phase"])
        if known(losses)
        else []
    )
    name = "val loss"
    points = [(one["step"], one["figures"][name]) for one in run["validations"] if name in one["figures"]]
    if points:
        x, y = zip(*points, strict=True)
        mark = {"size": 9, "symbol": "diamond"}
        traces.append(line("validation loss", x, y, colours.VALIDATION, mode="lines+markers", marker=mark))
    skipped = [one["step"] for one in run["skipped"]["listed"]]
    shown_values = [value for trace in traces for value in trace["y"] if value is not None]
    if skipped and traces:
        mark = {"symbol": "x", "size": 9, "color": colours.SKIPPED}
        traces.append({"type": "scatter", "mode": "markers", "name": "skipped step", "x": skipped,
                       "y": [min(shown_values)] * len(skipped), "marker": mark,
                       "hovertemplate": "non-finite"})  # fmt: skip
    if not traces:
        return None
    caption = "Training: mean over all ranks. Validation: at the end of an epoch." + describe_window(series)
    if skipped:
        caption += " Crosses at the lowest value mark skipped steps."
    shown = figure(traces, "step", "loss", log=is_positive(shown_values), **transition(run))
    shown["layout"]["yaxis"].pop("rangemode", None)
    return Chart("loss", "Loss", caption, shown)


def _validation(run: Mapping[str, Any]) -> Chart | None:
    """All validation metrics but the loss."""
    names = dict.fromkeys(name for one in run["validations"] for name in one["figures"] if name != "val loss")
    traces = []
    for place, name in enumerate(list(names)[:8]):
        points = [(one["step"], one["figures"][name]) for one in run["validations"] if name in one["figures"]]
        x, y = zip(*points, strict=True)
        colour, dash = colours.series_style(place + 1)
        marks: dict[str, Any] = {"mode": "lines+markers", "line": {"dash": dash}, "marker": {"size": 8}}
        traces.append(line(label(name), x, y, colour, **marks))
    if not traces:
        return None
    title = "value" if len(traces) > 1 else label(next(iter(names)))
    caption = "At the end of an epoch, over all validation data. Error rates are shares and may exceed 1."
    return Chart("validation", "Validation", caption, figure(traces, "step", title, **transition(run)))


def _density(run: Mapping[str, Any]) -> Chart | None:
    """The density of sparse steps; dense ones, which send everything, would hide it."""
    series = run["series"]
    sparse = [place for place, phase in enumerate(series["phase"]) if phase == SPARSE]
    x = [series["step"][place] for place in sparse]
    local = {key: _percents(values, sparse) for key, values in series["local_density"].items()}
    if not known(local["mean"]):
        return None
    share = [
        ("result", _percents(series["global_density"], sparse), colours.GLOBAL, "dot"),
        ("target", _percents(series["target_density"], sparse), colours.TARGET, "dash"),
    ]
    traces = spread("sent by rank 0", x, local, colours.LOCAL, "%")
    traces += [line(name, x, values, colour, "%", line={"dash": dash}) for name, values, colour, dash in share]
    asked = run["about"]["density"]
    wanted = f" Asked for: {100 * asked:.3g} %." if isinstance(asked, float) else ""
    caption = f"Sparse steps only. Share of the entries: sent by rank 0, the target, and in the result.{wanted}"
    drawn = [value for trace in traces for value in trace["y"] if value is not None]
    wide = is_positive(drawn) and max(drawn) > 8 * min(drawn)
    return Chart("density", "Density of sparse steps", caption, figure(traces, "step", "density (%)", log=wide))


def _percents(values: Sequence[float | None], places: Sequence[int]) -> list[float | None]:
    return [None if (value := values[place]) is None else 100 * value for place in places]


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
        "Bytes that rank 0 sent in a step, headers and control included. Dense is modelled as a ring, because "
        "the library's all-reduce does not report its bytes. 6k(P−1)/P words are Ok-Topk's bound, "
        "2k(P−1)/P the least for plain indices and values; coded indices can go below it. A word has 4 bytes."
    )
    shown = figure(traces, "step", "bytes per step (B)", log=True, **transition(run))
    shown["layout"]["yaxis"] |= {"exponentformat": "SI"}
    return Chart("bytes", "Bytes on the wire", caption, shown)


def _messages(run: Mapping[str, Any], phase: str) -> Chart | None:
    """Message counts per step, by size. A kind of message has the same colour in both phases."""
    kinds = list(dict.fromkeys((kind["operation"], kind["stage"]) for kind in run["messages"]))
    ours = [kind for kind in run["messages"] if kind["phase"] == phase and kind["sizes"]]
    if not ours:
        return None
    powers = sorted({int(power) for kind in ours for power in kind["sizes"]})
    powers = list(range(powers[0], powers[-1] + 1))
    steps = run["phases"][phase]["steps"]
    traces = []
    for kind in ours:
        colour, _ = colours.series_style(kinds.index((kind["operation"], kind["stage"])))
        sizes = {int(power): count / steps for power, count in kind["sizes"].items()}
        pattern = "/" if kind["modelled"] else "." if kind["control"] else ""
        name = f"{kind['operation']}, {kind['stage']}"
        more = ", modelled" * kind["modelled"] + ", control" * kind["control"]
        hatch = {"shape": pattern, "fillmode": "replace", "fgcolor": colour} if pattern else {}
        traces.append({
            "type": "bar", "name": label(name) + more, "x": [format_size(power) for power in powers],
            "y": [sizes.get(power) for power in powers], "marker": {"color": colour, "pattern": hatch},
            "hovertemplate": f"%{{y:{DIGITS}}} per step",
        })  # fmt: skip
    caption = (
        f"Messages that rank 0 sent in a {phase} step, by size: “4 KiB” are those from 4 KiB to below 8 KiB. "
        "Hatched: modelled as a ring; dotted: control."
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
        "Rank 0 sends the entries of gradient plus residual whose magnitude reaches the local threshold; the "
        "result keeps the sums that reach the global one."
    )
    shown = figure(traces, "step", "threshold (gradient units)", log=True, **transition(run))
    return Chart("thresholds", "Thresholds", caption, shown)


def _residual(run: Mapping[str, Any]) -> Chart | None:
    series = run["series"]
    if not known(series["residual_norm"]):
        return None
    trace = line("residual of rank 0", series["step"], series["residual_norm"], colours.RESIDUAL, connectgaps=True)
    caption = "Norm of the residual of rank 0; large buckets measure it every 16 steps."
    shown = figure([trace], "step", "L2 norm (gradient units)", **transition(run))
    return Chart("residual", "Residual norm", caption, shown)
