"""The law of composition: a clock is the sum of its steps, wherever their times come from. And the crossover."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.tools.crossover import Cost, measure_crossover, predict_crossover
from oktopk.tools.race.cells import Point, Step
from oktopk.tools.race.compose import PhaseMean, compose, phase_means
from oktopk.tools.race.spec import RaceError

PHASES = ("dense", "ramp", "sparse")
seconds = st.floats(1e-4, 1e3)
runs = st.lists(st.tuples(st.sampled_from(PHASES), seconds, st.floats(0, 1e9)), min_size=1, max_size=60).map(
    lambda rows: [Step(number, *row) for number, row in enumerate(rows, start=1)]
)


def curve_of(steps: list[Step]) -> list[Point]:
    """A validation after every step, and one before the first."""
    points = [Point(0, 0.0, 0.0, {"val loss": 5.0})]
    for step in steps:
        before = points[-1]
        points.append(
            Point(step.step, before.seconds + step.seconds, before.sent_bytes + step.sent_bytes, {"val loss": 1.0})
        )
    return points


@given(runs, st.dictionaries(st.sampled_from(PHASES), seconds, min_size=3))
def test_a_composed_clock_is_the_sum_of_its_parts(steps: list[Step], times: dict[str, float]) -> None:
    means = {phase: PhaseMean(50, value, 10 * value) for phase, value in times.items()}
    moved, curve = compose(steps, curve_of(steps), means)
    for point in curve:
        parts = [times[step.phase] for step in steps[: point.step]]
        assert point.seconds == pytest.approx(math.fsum(parts))
        assert point.sent_bytes == pytest.approx(10 * math.fsum(parts))
    assert [step.phase for step in moved] == [step.phase for step in steps]


@given(runs)
def test_the_steps_of_a_full_run_compose_to_its_own_clock(steps: list[Step]) -> None:
    curve = curve_of(steps)
    _, composed = compose(steps, curve, phase_means(steps))
    assert composed[-1].seconds == pytest.approx(curve[-1].seconds)
    assert composed[-1].sent_bytes == pytest.approx(curve[-1].sent_bytes)
    assert [point.metrics for point in composed] == [point.metrics for point in curve]


def test_first_steps_of_a_phase_are_left_out_of_its_mean() -> None:
    steps = [
        Step(1, "dense", 9.0, 8),
        Step(2, "dense", 9.0, 8),
        Step(3, "dense", 1.0, 8),
        Step(4, "sparse", 5.0, 2),
    ]
    means = phase_means(steps, unsteady=2)
    assert means == {"dense": PhaseMean(1, 1.0, 8), "sparse": PhaseMean(1, 5.0, 2)}


def test_a_phase_without_times_is_an_error() -> None:
    with pytest.raises(RaceError, match="sparse phase"):
        compose([Step(1, "sparse", 1.0, 1.0)], [], {"dense": PhaseMean(1, 1.0, 1.0)})


@given(st.floats(0.1, 1e3), st.floats(1e6, 1e12), st.floats(0.01, 1e3), st.floats(0, 0.9), st.floats(0, 10))
def test_both_ways_take_the_same_time_at_the_predicted_crossover(
    compute: float, sent: float, extra: float, share: float, hidden: float
) -> None:
    dense, sparse = Cost(compute, sent, hidden), Cost(compute + extra, share * sent)
    rate = predict_crossover(dense, sparse)
    assert rate is not None
    assert sparse.at(rate) == pytest.approx(dense.at(rate), rel=1e-5)
    assert sparse.at(rate / 2) < dense.at(rate / 2)
    assert sparse.at(rate * 2) > dense.at(rate * 2)
    if hidden == 0:
        assert rate == pytest.approx(8 * (1 - share) * sent / extra, rel=1e-6)


def test_who_always_wins_has_no_crossover() -> None:
    assert predict_crossover(Cost(10, 1e9), Cost(9, 1e6)) == math.inf
    assert predict_crossover(Cost(10, 1e6), Cost(11, 1e9)) is None


@given(st.floats(1e6, 1e10), st.floats(0.5, 50), st.floats(1.1, 100))
def test_a_measured_crossover_is_exact_where_time_is_bytes_over_rate(
    at: float, compute: float, away: float
) -> None:
    dense, sparse = Cost(compute, at * compute / 8), Cost(2 * compute, 0.0)
    rates = [at / away, at * away]
    found = measure_crossover({r: dense.at(r) for r in rates}, {r: sparse.at(r) for r in rates})
    assert found is not None
    assert found == (pytest.approx(at, rel=1e-6), *rates)
    assert predict_crossover(dense, sparse) == pytest.approx(at, rel=1e-6)
    assert measure_crossover(dict.fromkeys(rates, 1.0), dict.fromkeys(rates, 2.0)) is None
