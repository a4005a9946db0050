"""Curves that the eye can follow: rolling means and medians, and the mean of several runs with their range."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from ..units import round_for_chart

Values = Sequence["float | None"]
Curve = tuple[Sequence[float], Values]
"""The x and y of a run; x does not fall."""
_SHARE = 24
"""A window has this part of the points."""
_GRID = 160


def window(points: int) -> int:
    """The width of the window for so many points: odd, and 1 for short curves, which are shown as they are.

    >>> window(20), window(100), window(400)
    (1, 5, 17)
    """
    return points // _SHARE | 1


def roll(values: Values, width: int, reduce: Callable[[Iterable[float]], float] = fmean,
         parts: Sequence[Any] | None = None) -> list[float | None]:  # fmt: skip
    """Reduce the `width` points around each; missing values stay missing, and no window spans two parts.

    >>> roll([1, 2, None, 6, 7], 3)
    [1.5, 1.5, None, 6.5, 6.5]
    >>> roll([1, 1, 9, 9], 3, parts=["dense", "dense", "sparse", "sparse"])
    [1.0, 1.0, 9.0, 9.0]
    """
    part, half = parts or [None] * len(values), width // 2
    found: list[float | None] = []
    for place, value in enumerate(values):
        around = range(max(0, place - half), min(len(values), place + half + 1))
        known = [one for at in around if part[at] == part[place] and (one := values[at]) is not None]
        found.append(None if value is None else round_for_chart(float(reduce(known))))
    return found


def bundle(curves: Sequence[Curve], geometric: bool = False) -> dict[str, list[float]]:
    """The mean, lowest and highest of curves, over the x that all of them have. Between points, curves are lines.

    >>> bundle([([0, 1, 2], [1, 2, 3]), ([0, 2], [3, None]), ([0, 1, 2, 3], [2, 3, 4, 5])])
    {'x': [], 'mean': [], 'low': [], 'high': []}
    >>> bundle([([0, 1, 2], [1, 2, 3]), ([0, 2], [3, 5])])
    {'x': [0.0, 1.0, 2.0], 'mean': [2.0, 3.0, 4.0], 'low': [1.0, 2.0, 3.0], 'high': [3.0, 4.0, 5.0]}
    """
    known = [[(float(x), float(y)) for x, y in zip(*curve, strict=True) if y is not None] for curve in curves]
    grid = _grid(known, geometric) if all(known) else []
    lines = [[_at(points, x) for x in grid] for points in known]
    columns = list(zip(*lines, strict=True))
    return {
        "x": [float(f"{x:.8g}") for x in grid],
        "mean": [float(f"{fmean(column):.5g}") for column in columns],
        "low": [min(column) for column in columns],
        "high": [max(column) for column in columns],
    }


def _grid(curves: Sequence[Sequence[tuple[float, float]]], geometric: bool) -> list[float]:
    """Where curves are compared: at their own points if these are few, else at even distances."""
    low, high = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    own = sorted({x for points in curves for x, _ in points if low <= x <= high})
    if len(own) <= _GRID:
        return own if len(own) > 1 else []
    shares = [place / (_GRID - 1) for place in range(_GRID)]
    if geometric and low > 0:
        return [low * (high / low) ** share for share in shares[:-1]] + [high]
    return [low + (high - low) * share for share in shares[:-1]] + [high]


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    place = bisect_left(points, x, key=lambda point: point[0])
    if place == 0 or points[min(place, len(points) - 1)][0] == x:
        return points[min(place, len(points) - 1)][1]
    (left, low), (right, high) = points[place - 1], points[min(place, len(points) - 1)]
    return float(f"{low + (high - low) * (x - left) / (right - left):.5g}") if right > left else high
