"""Curves: smoothed without leaving the data's range, averaged where all runs are, density of sparse steps only."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.tools.report import build_report, read_run
from oktopk.tools.report.html.charts import make_charts
from oktopk.tools.report.html.comparison import make_comparison
from oktopk.tools.report.html.smoothing import bundle, roll, window
from tests.support.report_runs import write_run

values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=40)


@given(values, st.integers(0, 6), st.sampled_from([fmean, median]))
def test_a_rolling_value_is_among_its_neighbours(found: list[float | None], half: int, reduce: Any) -> None:
    smooth = roll(found, 2 * half + 1, reduce)
    assert [one is None for one in smooth] == [one is None for one in found]
    for place, one in enumerate(smooth):
        near = [y for y in found[max(0, place - half) : place + half + 1] if y is not None]
        if one is not None:
            slack = 1e-4 * max(map(abs, near))
            assert min(near) - slack <= one <= max(near) + slack


@given(values)
def test_no_window_spans_two_phases(found: list[float | None]) -> None:
    cut = len(found) // 2
    parts = ["dense"] * cut + ["sparse"] * (len(found) - cut)
    assert roll(found, 9, parts=parts) == roll(found[:cut], 9) + roll(found[cut:], 9)


points = st.lists(
    st.tuples(st.integers(0, 1000), st.floats(-1e3, 1e3)), min_size=2, max_size=300, unique_by=lambda p: p[0]
)


@given(st.lists(points.map(sorted), min_size=1, max_size=4), st.booleans())
def test_a_mean_of_runs_is_within_their_band(runs: list[list[tuple[int, float]]], geometric: bool) -> None:
    joint = bundle([([x for x, _ in run], [y for _, y in run]) for run in runs], geometric)
    for x, low, mean, high in zip(joint["x"], joint["low"], joint["mean"], joint["high"], strict=True):
        slack = 1e-3 * (1 + max(abs(low), abs(high)))
        assert low - slack <= mean <= high + slack
        assert all(run[0][0] - 1e-4 <= x <= run[-1][0] + 1e-4 for run in runs)
    if len(runs) == 1 and len(runs[0]) <= 160:
        assert joint["mean"] == pytest.approx([y for _, y in runs[0]], rel=1e-3, abs=1e-9)


def chart(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    run = build_report([read_run(write_run(folder, **options), "run")])["runs"][0]
    return next(one.figure for one in make_charts(run) if one.name == name)


def test_density_begins_with_the_sparse_phase(tmp_path: Path) -> None:
    for trace in chart(tmp_path, "density", steps=24, warmup=8)["data"]:
        assert trace["x"] == list(range(8, 24))
        assert max(trace["y"]) < 2  # per cent


def test_a_long_loss_is_smoothed_on_a_logarithmic_axis(tmp_path: Path) -> None:
    shown = chart(tmp_path, "loss", steps=100, warmup=50)
    series = {trace["name"]: trace["y"] for trace in shown["data"]}
    assert window(100) > 1
    assert len(series["training loss"]) == len(series["rolling mean"]) == 100
    assert series["rolling mean"][:50] == pytest.approx(roll(series["training loss"][:50], window(100)))
    assert shown["layout"]["yaxis"]["type"] == "log"
    assert shown["layout"]["meta"] == {"scales": True}


def test_one_slow_step_does_not_move_the_median(tmp_path: Path) -> None:
    shown = chart(tmp_path, "time", steps=100, warmup=50)
    compute = next(trace for trace in shown["data"] if trace["name"] == "compute")
    assert set(compute["y"]) == {1200.0}
    run = build_report([read_run(tmp_path, "run")])["runs"][0]
    run["series"]["seconds"]["forward"][70] = 60.0
    again = next(one.figure for one in make_charts(run) if one.name == "time")
    assert next(trace for trace in again["data"] if trace["name"] == "compute")["y"] == compute["y"]
    single = next(trace for trace in again["data"] if trace["name"] == "single steps")
    assert max(single["y"]) > 60_000 > again["layout"]["yaxis"]["range"][1]


def test_seeds_of_a_setting_are_one_line_with_a_band(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed), str(seed)) for seed in range(3)]
    shown = next(one for one in make_comparison(build_report(runs)["runs"]) if one.name == "loss-steps")
    named = [trace for trace in shown.figure["data"] if trace.get("showlegend", True)]
    assert [trace["name"] for trace in named] == ["oktopk, 1 %"]
    assert "lowest to highest seed" in shown.caption
