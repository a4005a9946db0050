"""The worked example of docs/understanding.md: one step of Ok-Topk on 3 ranks and 12 entries, computed by oktopk.

    python docs/pictures/understanding.py      prints the example, and draws understanding-*.png beside this file

The library computes everything that is drawn: `example()` runs `sparse_allreduce` on three ranks, records the
stages of the algorithm, and checks them against the result of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import oktopk
from oktopk.algorithms import OkTopk

RANKS, SIZE, K = 3, 12, 3
GRADIENTS = (
    (0.1, 0.6, 0.0, -0.2, 0.1, 0.4, 0.1, 0.0, -0.6, 0.1, 0.0, 0.1),
    (0.0, 0.2, 0.1, 0.1, -0.1, 0.1, 0.0, 0.5, 0.1, 0.0, -0.4, 0.2),
    (0.2, 0.1, -0.1, 0.0, 0.0, 0.5, 0.1, 0.1, -0.4, 0.1, -0.1, 0.0),
)
RESIDUALS = (
    (0.0, 0.3, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, -0.2, 0.1, 0.0, 0.0),
    (0.0, 0.4, 0.1, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, -0.5, 0.0),
    (0.0, 0.0, -0.3, 0.1, 0.0, 0.0, 0.0, 0.0, -0.3, 0.0, -0.2, 0.0),
)
"""Unsent gradient of earlier steps."""


@dataclass(frozen=True)
class Rank:
    """The step as seen by one rank. Entries are keyed by index and rounded to one decimal."""

    accumulated: list[float]
    selected: dict[int, float]
    edges: list[int]
    sums: dict[int, float]
    """Of the region that this rank owns."""
    survivors: dict[int, float]
    mean: list[float]
    residual: list[float]
    threshold: float
    global_threshold: float


def example() -> list[Rank]:
    ranks = oktopk.run_threads(RANKS, _rank)
    _check(ranks)
    return ranks


def _rank(comm: oktopk.Communicator) -> Rank:
    recorded: dict[str, Any] = {}

    class RecordingOkTopk(OkTopk):
        """Ok-Topk that records its stages; their names are those of the paper."""

        def _select_overall(self, channel, sums, edges, k, last):  # type: ignore[no-untyped-def]
            recorded["sums"] = _entries(sums)
            return super()._select_overall(channel, sums, edges, k, last)

        def _balance_and_gather(self, channel, overall, edges):  # type: ignore[no-untyped-def]
            recorded["survivors"], recorded["edges"] = _entries(overall.own), list(edges)
            return super()._balance_and_gather(channel, overall, edges)

    gradient, residual = torch.tensor(GRADIENTS[comm.rank]), torch.tensor(RESIDUALS[comm.rank])
    accumulated = _rounded(gradient + residual)
    mean, info = oktopk.sparse_allreduce(gradient, K / SIZE, RecordingOkTopk(), residual, comm)
    selected = {i: x for i, x in enumerate(accumulated) if abs(x) >= round(info.threshold, 6)}
    assert len(selected) == info.local_count == info.target == K
    thresholds = {"threshold": info.threshold, "global_threshold": info.global_threshold}
    return Rank(accumulated, selected, mean=_rounded(mean), residual=_rounded(residual), **recorded, **thresholds)


def _check(ranks: list[Rank]) -> None:
    """The recorded stages lead to the result, and no gradient is lost."""
    for owner, rank in enumerate(ranks):
        region = range(*rank.edges[owner : owner + 2])
        wanted = {i: sum(other.selected.get(i, 0.0) for other in ranks) for i in region}
        sent = {i for other in ranks for i in other.selected if i in region}
        assert rank.sums == {i: round(wanted[i], 6) for i in sorted(sent)}
        assert rank.mean == ranks[0].mean
    winners = {i: x for rank in ranks for i, x in rank.survivors.items()}
    assert {i: round(x / RANKS, 6) for i, x in winners.items()} == _entries_of(ranks[0].mean)
    for i in range(SIZE):
        kept, whole = (sum(getattr(rank, name)[i] for rank in ranks) for name in ("residual", "accumulated"))
        assert abs(kept + RANKS * ranks[0].mean[i] - whole) < 1e-6
        for rank in ranks:
            left = i in rank.selected and i in winners
            assert rank.residual[i] == (0.0 if left else rank.accumulated[i])


def _rounded(x: torch.Tensor) -> list[float]:
    return [round(value, 6) + 0.0 for value in x.tolist()]


def _entries(vector: oktopk.SparseVector) -> dict[int, float]:
    return dict(zip(vector.indices.tolist(), _rounded(vector.values), strict=True))


def _entries_of(dense: list[float]) -> dict[int, float]:
    return {i: x for i, x in enumerate(dense) if x}


def text(ranks: list[Rank]) -> str:
    """The example as text: a dot is an empty entry."""
    edges, owner = ranks[0].edges, ranks[0]
    lines = ["index        " + "".join(f"{i:>6}" for i in range(SIZE))]
    lines += [_line(f"selected by {r}", rank.selected, edges) for r, rank in enumerate(ranks)]
    lines += [_line("sums", {i: x for rank in ranks for i, x in rank.sums.items()}, edges)]
    lines += [_line("survive", {i: x for rank in ranks for i, x in rank.survivors.items()}, edges)]
    lines += [_line("mean", _entries_of(owner.mean), edges)]
    lines += [_line(f"residual {r}", _entries_of(rank.residual), edges) for r, rank in enumerate(ranks)]
    return "\n".join(lines)


def _line(name: str, entries: dict[int, float], edges: list[int]) -> str:
    cells = [f"{entries[i]:.1f}" if i in entries else "." for i in range(SIZE)]
    cut = [f"{'|' if i in edges[1:-1] else ' '}{cell:>5}" for i, cell in enumerate(cells)]
    return f"{name:<13}" + "".join(cut)


# pictures

COLOURS = ("#7fb3e6", "#f2b277", "#9bd08f")
"""One per rank."""
Row = tuple[str, Any, dict[int, str]]
"""A name, values by index, and the colours of some entries."""
WINS, LOSES, PAPER = "#ffe08a", "#e6e6e6", "#ffffff"


def draw(folder: Path) -> list[Path]:
    ranks = example()
    edges = ranks[0].edges
    owners = [_owner(i, edges) for i in range(SIZE)]
    sums = {i: x for rank in ranks for i, x in rank.sums.items()}
    winners = {i for rank in ranks for i in rank.survivors}
    by_owner = {i: COLOURS[owners[i]] for i in sums}
    accumulate = [
        ("gradient", list(GRADIENTS[0]), {}),
        ("+ residual", list(RESIDUALS[0]), {}),
        ("= acc", ranks[0].accumulated, dict.fromkeys(ranks[0].selected, COLOURS[0])),
    ]
    select = [
        (f"acc of {r}", rank.accumulated, dict.fromkeys(rank.selected, COLOURS[r])) for r, rank in enumerate(ranks)
    ]
    reduce = [
        ("sums", sums, by_owner),
        ("survive", {i: sums[i] for i in winners}, dict.fromkeys(winners, WINS)),
    ]
    result = [("mean", _entries_of(ranks[0].mean), dict.fromkeys(winners, WINS))]
    for r, rank in enumerate(ranks):
        lost = {i: LOSES for i in rank.selected if i not in winners}
        sent = {i: WINS for i in rank.selected if i in winners}
        result.append((f"residual {r}", rank.residual, {**lost, **sent}))
    pictures = {
        "1-accumulate": ("rank 0: gradient + residual, and its 3 largest", accumulate, None),
        "2-select": ("each rank selects 3 entries; regions have owners", select, edges),
        "3-reduce": ("owners add up; the 3 largest sums survive", reduce, edges),
        "4-result": ("the mean, and what stays behind (grey: sent, but lost)", result, None),
    }
    return [_picture(folder / f"understanding-{name}.png", *what) for name, what in pictures.items()]


def _owner(index: int, edges: list[int]) -> int:
    return sum(index >= edge for edge in edges[1:-1])


def _picture(path: Path, title: str, rows: list[Row], edges: list[int] | None) -> Path:
    """Rows of twelve cells, readable at 400 pixels of width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = len(rows) + (0.9 if edges else 0.5)
    figure, axes = pyplot.subplots(figsize=(4.6, 0.36 * height + 0.3), dpi=200, layout="constrained")
    for y, row in enumerate(rows):
        _draw_row(axes, y, *row)
    for i in range(SIZE):
        axes.text(i + 0.5, -0.28, str(i), ha="center", va="center", fontsize=6, color="#888888")
    for owner, (start, stop) in enumerate(pairwise(edges or [])):
        _draw_region(axes, owner, start, stop, len(rows))
    axes.set(xlim=(-2.1, SIZE + 0.05), ylim=(len(rows) + (0.95 if edges else 0.05), -0.55), title=title)
    axes.title.set_fontsize(8.5)
    axes.axis("off")
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)
    return path


def _draw_row(axes: Any, y: int, name: str, values: Any, fill: dict[int, str]) -> None:
    from matplotlib.patches import Rectangle

    axes.text(-0.15, y + 0.5, name, ha="right", va="center", fontsize=7.5)
    sparse = isinstance(values, dict)
    for i in range(SIZE):
        axes.add_patch(Rectangle((i, y), 1, 1, facecolor=fill.get(i, PAPER), edgecolor="#bbbbbb", lw=0.6))
        value = values.get(i) if sparse else values[i]
        if value is not None:
            shade = "black" if sparse or i in fill else "#888888"
            axes.text(i + 0.5, y + 0.5, f"{value:.1f}", ha="center", va="center", fontsize=7.5, color=shade)


def _draw_region(axes: Any, owner: int, start: int, stop: int, rows: int) -> None:
    """A bracket below the cells with the owner's name, and a line at the edge."""
    below = [rows + depth for depth in (0.1, 0.25, 0.25, 0.1)]
    axes.plot([start, start, stop, stop], below, color=COLOURS[owner], lw=2)
    middle = (start + stop) / 2
    axes.text(middle, rows + 0.62, f"owner: rank {owner}", ha="center", va="center", fontsize=7)
    if start:
        axes.plot([start, start], [0, rows], color="black", lw=1.4)


if __name__ == "__main__":
    print(text(example()))
    for made in draw(Path(__file__).parent):
        print(made.name)
