"""What a report says of a run: times that add up, bytes as they were counted, bounds, thinned curves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.tools.report import ReportError, build_report, find_runs, name_runs, read_run
from oktopk.tools.report.analysis.document import describe_run
from oktopk.tools.report.analysis.phases import bounds
from oktopk.tools.report.analysis.runs import Reduction, Run, Step
from oktopk.tools.report.analysis.series import make_bins
from oktopk.tools.report.analysis.times import STAGES, WORK, split_step
from oktopk.tools.report.html.charts import make_charts
from oktopk.tools.report.html.comparison import make_comparison
from oktopk.tools.report.html.page import build_page
from tests.support.report_runs import BACKWARD, EXPOSED, FORWARD, SIZE, STEP, K, write_run, write_steps


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "run"), "run")


def answer(figures: dict[str, Any], question: str) -> str:
    return next(str(one["answer"]) for one in figures["answers"] if question in one["question"])


def test_the_stack_is_the_step_and_hidden_work_is_beside_it(run: Run) -> None:
    sparse = describe_run(run)["phases"]["sparse"]
    assert sum(sparse["seconds"].values()) == pytest.approx(STEP)
    assert sparse["step_seconds"] == pytest.approx(STEP)
    # bucket 0 ran beside backward, and so did half of bucket 1
    assert sparse["seconds"]["select"] == pytest.approx(0.04 / 2)
    assert sparse["hidden_seconds"]["select"] == pytest.approx(0.04 * 1.5)
    assert sparse["seconds"]["encode"] == pytest.approx((0.02 + 0.02) / 2)
    assert sparse["seconds"]["hand_over"] == pytest.approx(EXPOSED - 0.1)
    assert sparse["seconds"]["rest"] == pytest.approx(STEP - FORWARD - BACKWARD - EXPOSED)
    assert sparse["hidden_work_share"] == pytest.approx(0.3 / 0.4)
    assert sum(sparse["shares"].values()) == pytest.approx(1)


seconds = st.floats(0, 10)


@given(
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
    st.lists(seconds, min_size=4, max_size=4),
    seconds,
)
def test_whatever_overlapped_the_stack_is_the_step(
    buckets: list[tuple[float, float]], main: list[float], handed_over: float
) -> None:
    forward, backward, exposed, rest = main
    parts, clock = [], 0.0
    for gap, length in buckets:
        times = {"start_seconds": clock + gap, "stop_seconds": clock + gap + length, "exchange_seconds": length}
        parts.append(Reduction(0, "sparse", "oktopk", times))
        clock += gap + length
    train = {"forward_seconds": forward, "backward_seconds": backward, "exposed_seconds": exposed}
    train["step_seconds"] = forward + backward + exposed + rest
    found = split_step(
        Step(0, "sparse", numbers={"handed_over_seconds": handed_over}, train=train, reductions=tuple(parts))
    )
    assert found is not None
    assert found.step == pytest.approx(train["step_seconds"])
    assert min(*found.shown.values(), *found.hidden.values()) >= 0
    assert sum(found.shown[stage] for stage in (*WORK, "hand_over")) == pytest.approx(exposed)
    worked = sum(found.hidden.values()) + sum(found.shown[stage] for stage in WORK)
    assert worked == pytest.approx(sum(length for _, length in buckets))  # nothing is lost, nothing counted twice
    assert tuple(found.shown) == STAGES


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_bucket_that_went_dense_has_a_bound_of_its_own(world: int) -> None:
    """1,000 entries of which 10 are sent, and 50 that go dense."""
    parts = (
        Reduction(0, "sparse", "oktopk", {"size_entries": 1000.0, "target_count": 10.0}),
        Reduction(1, "dense", "oktopk", {"size_entries": 50.0, "target_count": 50.0}),
    )
    step = Step(0, "sparse", numbers={"size_entries": 1050.0, "target_count": 60.0}, reductions=parts)
    share = 4 * (world - 1) / world
    assert bounds(step, world) == pytest.approx(
        {"dense": 2 * 1050 * share, "6k": (60 + 100) * share, "2k": (20 + 100) * share}
    )


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_bytes_and_messages_are_those_that_were_counted(tmp_path: Path, world: int) -> None:
    figures = describe_run(read_run(write_run(tmp_path, world=world), "run"))
    others, steps, buckets = world - 1, figures["phases"]["sparse"]["steps"], 2
    assert steps == 16
    sparse = [kind for kind in figures["messages"] if kind["phase"] == "sparse"]
    assert sum(kind["bytes"] for kind in sparse) == steps * buckets * (70 + 130 + 8) * others
    assert figures["phases"]["sparse"]["sent_bytes"] == buckets * (70 + 130 + 8) * others
    gather = next(kind for kind in sparse if kind["stage"] == "gather")
    assert gather["sizes"] == ({7: steps * buckets * others} if others else {})
    assert not gather["modelled"]
    ring = next(kind for kind in figures["messages"] if kind["phase"] == "dense")
    assert ring["modelled"]
    assert sum(ring["sizes"].values()) == 8 * buckets * 2 * others
    assert sum(figures["phases"]["dense"]["sent_bytes_by_rank"]) == pytest.approx(1000 * world + sum(range(world)))
    assert not [note for note in figures["notes"] if "add up" in note]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_bounds_are_words_of_four_bytes(tmp_path: Path, world: int) -> None:
    sparse = describe_run(read_run(write_run(tmp_path, world=world), "run"))["phases"]["sparse"]
    k, n, share = 2 * K, 2 * SIZE, (world - 1) / world
    assert sparse["bound_6k_bytes"] == pytest.approx(4 * 6 * k * share)
    assert sparse["bound_2k_bytes"] == pytest.approx(4 * 2 * k * share)
    assert sparse["dense_bytes"] == pytest.approx(4 * 2 * n * share)


def test_the_questions_are_answered_in_words(run: Run) -> None:
    figures = describe_run(run)
    assert "At step 8, in epoch 0" in answer(figures, "start")
    assert "8 were dense and 16 sparse" in answer(figures, "start")
    assert "sent 1.1 %" in answer(figures, "density")
    assert "832 B per sparse step" in answer(figures, "bytes")
    assert "10.7 kB" in answer(figures, "bytes")
    assert "260 % of it" in answer(figures, "bytes")
    assert "1.5 s" in answer(figures, "time")
    assert answer(figures, "hidden").startswith("75 %")
    assert "val WER 1.25" in answer(figures, "learn")
    assert answer(figures, "skipped").startswith("None")


def test_a_run_that_never_was_sparse_says_so(tmp_path: Path) -> None:
    figures = describe_run(read_run(write_run(tmp_path, steps=5, warmup=9, algorithm="oktopk"), "run"))
    assert answer(figures, "start") == "Not yet: all 5 steps were dense. The plan starts with 9 dense steps."
    assert figures["first_sparse_step"] is None


def test_skipped_steps_are_named_with_their_culprits(tmp_path: Path) -> None:
    figures = describe_run(read_run(write_run(tmp_path, skipped={3: "rank 2: layer.weight", 9: "loss"}), "run"))
    assert figures["skipped"] == {
        "count": 2,
        "listed": [
            {"step": 3, "phase": "dense", "culprits": "rank 2: layer.weight"},
            {"step": 9, "phase": "sparse", "culprits": "loss"},
        ],
    }
    assert "rank 2: layer.weight" in answer(figures, "skipped")


def test_of_two_lines_for_a_step_the_later_one_counts(tmp_path: Path) -> None:
    write_run(tmp_path, steps=12, warmup=8)
    write_steps(tmp_path, 6, 14, warmup=7, world=3, buckets=1)  # resumed from step 6, sparse one step earlier
    run = read_run(tmp_path, "run")
    assert [step.number for step in run.steps] == list(range(14))
    assert [len(step.reductions) for step in run.steps] == [2] * 6 + [1] * 8
    assert describe_run(run)["first_sparse_step"] == 7


def test_long_runs_are_thinned_and_keep_their_extremes(run: Run) -> None:
    sparse = run.steps[-1]
    steps = [replace(run.steps[0], number=n) for n in range(1001)]
    steps += [replace(sparse, number=n, train={**sparse.train, "loss": float(n)}) for n in range(1001, 20000)]
    points = make_bins(steps, 400)
    assert [step for point in points for step in point] == steps
    assert not [point for point in points if len({step.phase for step in point}) > 1]
    document = build_report([replace(run, steps=tuple(steps))])
    figures = document["runs"][0]
    loss = figures["series"]["loss"]
    assert len(loss["mean"]) == len(figures["series"]["step"]) <= 402
    assert max(loss["high"][21:]) == 19999
    assert min(loss["low"][21:]) == 1001
    text = build_page(document)
    assert len(text.encode()) < 8_000_000
    assert "Curves are thinned: a point stands for up to 50 steps" in text


def test_charts_are_figures_of_plotly_with_titles_on_all_axes(tmp_path: Path) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    run = read_run(write_run(tmp_path / "a", skipped={3: "x"}), "a")
    document = build_report([run, read_run(write_run(tmp_path / "b", world=2, buckets=5), "b")])
    made = [
        *make_charts(document["runs"][0]),
        *make_charts(document["runs"][1]),
        *make_comparison(document["runs"]),
    ]
    assert {chart.name for chart in made} == {
        *("loss", "validation", "density", "bytes", "time", "phases", "messages-dense", "messages-sparse"),
        *("thresholds", "residual", "loss-steps", "loss-seconds", "loss-bytes", "validations"),
    }
    for chart in made:
        go.Figure(chart.figure)  # raises if it has a property that plotly does not know
        layout = chart.figure["layout"]
        assert layout["xaxis"]["title"]["text"]
        assert layout["yaxis"]["title"]["text"] or chart.name == "phases"
        assert chart.caption


def test_bars_of_a_phase_share_their_clock(run: Run) -> None:
    bars = next(chart for chart in make_charts(describe_run(run)) if chart.name == "phases").figure["data"]
    ends, begins = dict[str, float](), dict[str, float]()
    for bar in bars:
        for row, base, length, told in zip(bar["y"], bar["base"], bar["x"], bar["customdata"], strict=True):
            assert told == length
            ends[row] = max(ends.get(row, 0), base + length)
            begins[row] = min(begins.get(row, base), base)
    assert ends["sparse: step"] == pytest.approx(1e3 * STEP)
    assert begins["sparse: worker"] == pytest.approx(1e3 * (FORWARD + BACKWARD - 0.3))
    assert ends["sparse: worker"] == pytest.approx(1e3 * (FORWARD + BACKWARD + 0.1))


def test_a_sweep_stands_for_its_runs_in_their_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_run(tmp_path / "sweep" / name, steps=2, warmup=1)
    (tmp_path / "sweep" / "not-a-run").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": [{"run": "b"}, {"run": "a"}]}))
    assert name_runs(find_runs([tmp_path / "sweep"])) == ["b", "a", "c"]
    write_run(tmp_path / "other" / "a", steps=2, warmup=1)
    found = find_runs([tmp_path / "sweep" / "a", tmp_path / "other" / "a", tmp_path / "other"])
    assert name_runs(found) == ["sweep/a", "other/a"]


def test_what_is_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no run in"):
        find_runs([tmp_path])
    with pytest.raises(ReportError, match="is not a folder"):
        find_runs([tmp_path / "missing"])
