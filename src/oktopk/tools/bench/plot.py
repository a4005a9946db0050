"""Plot the records: one panel per link, one bar per contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oktopk.utils.files import atomic_path

from .names import BACKWARD, parse_contender
from .records import Record, is_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _TORCH, _FLOOR = "#0b6e99", "#9aa5b1", "#d9a441"
_WIDTH, _ROW, _FRAME = 4.6, 0.34, 1.7
_ROOM = 30.0
"""Axis length relative to the longest bar, to make room for its label."""


def draw(records: Sequence[Record], path: Path) -> None:
    """Plot the step times to a file."""
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(record["link"] for record in records))
    rows = max(sum(record["link"] == link for record in records) for link in links)
    figure = Figure((_WIDTH * len(links) + 1, _ROW * rows + _FRAME), layout="constrained")
    panels = figure.subplots(1, len(links), sharex=True, sharey=True, squeeze=False)[0]
    for panel, link in zip(panels, links, strict=True):
        _panel(panel, [record for record in records if record["link"] == link])
        panel.set_title(_title(link))
    figure.suptitle(_headline(records[0]))
    figure.supxlabel("labels: median · speedup over ddp · sent per rank and step", fontsize=8)
    with atomic_path(path) as draft:
        figure.savefig(draft, dpi=150, format=path.suffix.lstrip("."))


def _headline(record: Record) -> str:
    return (
        f"Backward with gradient exchange, median\n{record['model']}, {record['params'] / 1e6:.4g}M "
        f"parameters, {record['ranks']} ranks, density {100 * record['density']:g} %"
    )


def _title(link: str | None) -> str:
    if link is None:
        return "loopback"
    return "no limit" if link == "none" else f"{link} links"


def _panel(panel: Axes, records: Sequence[Record]) -> None:
    milliseconds = [1e3 * record["median_step_seconds"] for record in records]
    names = [record["name"] for record in records]
    bars = panel.barh(names, milliseconds, color=[_color(name) for name in names])
    panel.bar_label(bars, [_label(record) for record in records], padding=3, fontsize=8)
    if BACKWARD in names:
        panel.axvline(milliseconds[names.index(BACKWARD)], color=_FLOOR, linestyle="--", linewidth=1)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    left, right = panel.get_xlim()
    panel.set_xlim(min(left, min(milliseconds) / 2), max(right, max(milliseconds) * _ROOM))
    panel.set_xlabel("ms per step (logarithmic)")
    if not panel.yaxis_inverted():
        panel.invert_yaxis()  # the first on top
    panel.spines[["top", "right"]].set_visible(False)


def _color(name: str) -> str:
    if name == BACKWARD or is_limit(name):
        return _FLOOR
    return _TORCH if parse_contender(name) is None else _OURS


def _label(record: Record) -> str:
    """Label a bar with its time, its speedup over DDP, and the bytes sent."""
    parts = [f"{1e3 * record['median_step_seconds']:,.0f} ms"]
    if record["name"] == BACKWARD:
        return parts[0]
    if record["ddp_over_it"] is not None:
        parts.append(f"{record['ddp_over_it']:.3g}×")
    if record["sent_bytes"] is not None:
        parts.append(f"{record['sent_bytes'] / 1e6:.3g} MB")
    return " · ".join(parts)
