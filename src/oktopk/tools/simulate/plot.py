"""Plot a simulation: step time and bytes against the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from oktopk.utils.files import atomic_path

from .crossings import bounds
from .study import Answer, Question

_MARKS = "osD^vP"


def draw(path: Path, question: Question, answers: Sequence[Answer]) -> None:
    """Plot to a file; its suffix selects the format, as in simulate.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    times, volumes = figure.subplots(1, 2)
    figure.suptitle(
        f"simulated: {question.size:,} parameters, density {question.density:g}, {question.network} per rank",
        fontsize="medium",
    )
    _lines(times, question, answers, lambda one: 1e3 * one.step.seconds)
    times.set(ylabel="ms per step", title="time of a reduction")
    _lines(volumes, question, answers, lambda one: one.step.sent_bytes / 1e6)
    _bounds(volumes, question)
    volumes.set(ylabel="MB sent per rank and step", title="bytes")
    handles, names = volumes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    with atomic_path(path) as draft:
        figure.savefig(draft, dpi=150, format=path.suffix[1:])


def _lines(axes: Any, question: Question, answers: Sequence[Answer], figure: Callable[[Answer], float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    ranks = sorted(question.ranks)
    for name, mark in zip(question.algorithms, cycle(_MARKS)):
        own = {one.ranks: figure(one) for one in answers if one.algorithm == name}
        axes.plot(ranks, [own[r] or float("nan") for r in ranks], marker=mark, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(ranks, [str(r) for r in ranks])
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.3)


def _bounds(axes: Any, question: Question) -> None:
    ranks = [r for r in sorted(question.ranks) if r > 1]
    for name, label, style in (("oktopk", "6k(P-1)/P words", "--"), ("sparse", "2k(P-1)/P words", ":")):
        megabytes = [4e-6 * getattr(bounds(r, question.size, question.k), name) for r in ranks]
        axes.plot(ranks, megabytes, style, color="gray", linewidth=1, label=label)
