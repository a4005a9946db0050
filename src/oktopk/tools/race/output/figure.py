"""The race as a picture: metric against time for each link, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.tools.report.html.colours import GREY
from oktopk.utils.files import atomic_path

from ..links import link_name
from ..summary import COMPOSED
from .page import links_of, styles_of
from .tables import break_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]
_WIDTH, _HEIGHT = 5.2, 3.6
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw(document: Document, path: Path) -> None:
    """Draw the race to a .svg, .pdf or .png file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    links = links_of(document)
    with rc_context({"svg.hashsalt": "oktopk", "svg.fonttype": "none"}):  # the same file for the same race
        figure = Figure((_WIDTH * max(1, len(links)), 2 * _HEIGHT), layout="constrained")
        panels = figure.subplots(2, max(1, len(links)), squeeze=False)
        for place, link in enumerate(links):
            _curves(panels[0][place], document, link)
            _outcome(panels[1][place], document, link)
        names = {
            name: line
            for panel in panels[0]
            for line, name in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        labels = ["\n".join(break_name(name)) for name in names]
        figure.legend(names.values(), labels, loc="outside lower center", ncols=min(3, max(1, len(names))),
                      frameon=False, fontsize=7.5)  # fmt: skip
        config, ranks = document["race"]["config"], document["race"]["ranks"]
        what = document["target"] or (f"{document['seconds']:g} s each" if document["seconds"] else "")
        figure.suptitle(f"{config['dnn']}, {ranks} ranks: {what}", fontsize=11)
        kind = path.suffix.lstrip(".")
        with atomic_path(path) as draft:
            figure.savefig(draft, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)


def _curves(panel: Axes, document: Document, link: str) -> None:
    styles, metric, seen = styles_of(document), document["metric"], set[str]()
    trained: list[float] = []
    trials = [trial for trial in document["trials"] if trial["link"] == link]
    composed = {trial["contender"] for trial in trials if trial["how"] == COMPOSED}
    order = list(styles)
    for trial in sorted(trials, key=lambda trial: order.index(trial["contender"])):
        name = trial["contender"]
        if trial["how"] != COMPOSED and name in composed:
            continue
        colour, dash = styles[name]
        points = [(p["seconds"], p["metrics"].get(metric)) for p in trial["curve"]]
        known = [(x, y) for x, y in points if y is not None]
        trained += [y for x, y in known if x > 0]
        panel.plot(
            [x for x, _ in known], [y for _, y in known], color=colour, linestyle=_DASHES[dash], marker=".",
            markersize=4, linewidth=1.3, label=None if name in seen else name,
        )  # fmt: skip
        seen.add(name)
    if document["race"]["target"] is not None:
        panel.axhline(document["race"]["target"]["value"], color=GREY, linestyle="--", linewidth=1)
    if trained:  # the metric before the first step would leave no room for the others
        margin = 0.08 * (max(trained) - min(trained)) or 0.01
        panel.set_ylim(min(trained) - margin, max(trained) + margin)
    panel.set_title(link_name(link), fontsize=10)
    panel.set_xlabel("time on the clock (s)", fontsize=9)
    panel.set_ylabel(str(metric), fontsize=9)
    _plain(panel)


def _outcome(panel: Axes, document: Document, link: str) -> None:
    """Time to target or the last metric: a point for each contender, with the spread over seeds."""
    by_time = document["target"] is not None
    key, digits = ("seconds", ".1f") if by_time else ("final", ".3f")
    rows = [row for row in document["rows"] if row["link"] == link]
    styles = styles_of(document)
    for place, row in enumerate(rows):
        colour, known = styles[row["contender"]][0], row[key]
        if known is None:
            panel.text(0.02, place, "not reached", transform=panel.get_yaxis_transform(), va="center", fontsize=8)
            continue
        panel.errorbar(known["mean"], place, xerr=known["std"], fmt="o", color=colour, capsize=3)
        panel.annotate(f"{known['mean']:{digits}}", (known["mean"], place), (0, 7), textcoords="offset points",
                       ha="center", fontsize=8)  # fmt: skip
    names = [row["contender"] + (" (composed)" if row["how"] == COMPOSED else "") for row in rows]
    panel.set_yticks(range(len(rows)), ["\n".join(break_name(name)) for name in names], fontsize=7.5)
    panel.set_ylim(len(rows) - 0.5, -0.7)
    panel.set_xlabel(f"time to {document['target']} (s)" if by_time else f"last {document['metric']}", fontsize=9)
    panel.margins(x=0.1)
    if by_time:
        panel.set_xlim(left=0)
    panel.grid(axis="y", color="#e6e6e6")
    _plain(panel)


def _plain(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
