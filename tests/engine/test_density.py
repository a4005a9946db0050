"""density="auto": the largest density within a budget, on made-up links; and how a run is repeated."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oktopk
from oktopk.engine.autotune import Autotune, Schedule
from oktopk.engine.density.budget import DensityBudget
from oktopk.engine.density.model import (
    SPREAD,
    TOLERANCE,
    WINDOW,
    Budget,
    Costs,
    Course,
    Measured,
    decide,
    explain,
)
from oktopk.engine.settings import Settings
from tests.support import stepping
from tests.support.stepping import gradients, on_ranks, reducer_on, same_bits

BUDGET = Budget(share=0.1, least=0.01)
World = Callable[[int, float], tuple[float, float]]
"""world(step, density): exposed seconds of a sparse step, and its whole length."""
MBIT = 1e6 / 8


@dataclass(frozen=True)
class Link:
    """A model of 3.2M parameters, 12 bytes for each entry that is sent, and a link."""

    rate: float
    """Bytes per second."""
    fixed: float = 0.004
    base: float = 1.0
    hidden: float = 0.0
    """Seconds of the exchange that backward hides."""

    @property
    def slope(self) -> float:
        return 12 * 3.2e6 / self.rate

    def __call__(self, step: int, density: float) -> tuple[float, float]:
        exposed = max(0.0, self.fixed + self.slope * density - self.hidden)
        return exposed, self.base + exposed - self.fixed

    def cost(self, density: float) -> float:
        """The exposed time that depends on the density, as a share of a step without it."""
        return max(0.0, self.slope * density - max(0.0, self.hidden - self.fixed)) / self.base

    @property
    def best(self) -> float:
        return BUDGET.limit((0.1 * self.base + max(0.0, self.hidden - self.fixed)) / self.slope)


def follow(world: World, steps: int, budget: Budget = BUDGET) -> list[float]:
    """The densities of a run on which nothing but `decide` acts."""
    course, timed, densities = Course.first(0, budget), [], []
    for step in range(steps):
        density = course.density_at(step, budget)
        densities.append(density)
        if course.counts(step):
            timed.append(Measured(density, *world(step, density)))
        if step == course.start + WINDOW - 1:
            course, timed = replace(decide(course, timed, budget) or course, start=step + 1), []
    return densities


def typical(densities: Sequence[float]) -> float:
    """Without the steps of probes."""
    return median(densities)


# Links that stay.


@pytest.mark.parametrize("rate", [20, 50, 100, 200, 400, 1000, 10_000, 1e6])
def test_the_largest_density_within_the_budget_is_found(rate: float) -> None:
    link = Link(rate * MBIT)
    densities = follow(link, 200)
    assert link.best / TOLERANCE <= typical(densities[64:]) <= link.best * TOLERANCE
    assert set(densities[:16]) == {0.01, 0.04}


@given(rate=st.floats(1, 1e5), fixed=st.floats(0, 0.09), base=st.floats(0.05, 5.0), hidden=st.floats(0, 0.3))
def test_any_link_ends_inside_the_budget_unless_the_least_density_is_too_much(
    rate: float, fixed: float, base: float, hidden: float
) -> None:
    link = Link(rate * MBIT, fixed * base, base, hidden * base)
    densities = follow(link, 400)
    last = typical(densities[-64:])
    assert link.cost(last) <= 0.1 * TOLERANCE**2 or last == BUDGET.least
    assert last >= link.best / TOLERANCE**2
    assert all(BUDGET.least <= density <= BUDGET.most for density in densities)


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=200, max_size=200),
    st.floats(1e-3, 0.25),
    st.floats(1e-3, 1.0),
)
def test_whatever_the_clock_says_densities_stay_in_their_range(
    times: list[tuple[float, float]], least: float, share: float
) -> None:
    densities = follow(lambda step, density: times[step], 200, Budget(share, least))
    assert all(least <= density <= 0.25 for density in densities)


def test_without_communication_density_is_at_its_most() -> None:
    densities = follow(lambda step, density: (0.0, 0.1), 200)
    assert typical(densities[48:]) == 0.25
    assert max(b / a for a, b in itertools.pairwise(densities)) <= SPREAD


@pytest.mark.parametrize(("fixed", "density"), [(0.09, 0.25), (0.11, 0.01), (0.5, 0.01)])
def test_latency_does_not_count_until_it_alone_exceeds_the_budget(fixed: float, density: float) -> None:
    densities = follow(Link(1e6 * MBIT, fixed), 200)
    assert typical(densities[64:]) == density


@pytest.mark.parametrize(
    ("rate", "least", "density"), [(1e6, 0.001, 0.01), (1e6, 0.05, 0.05), (20, 0.001, 0.0065)]
)
def test_fixed_costs_alone_never_ask_for_less_than_one_percent(rate: float, least: float, density: float) -> None:
    """Though less may be allowed: it would not help. Only a slow link is a reason."""
    found = typical(follow(Link(rate * MBIT, fixed=0.5), 200, Budget(0.1, least))[64:])
    assert found == pytest.approx(density, rel=TOLERANCE - 1)


def test_only_what_backward_does_not_hide_counts() -> None:
    """Half a second is hidden: five times as much can be sent as its budget alone would pay for."""
    link = Link(50 * MBIT, hidden=0.504)
    assert link.best == pytest.approx(6 * 0.1 / link.slope)
    assert typical(follow(link, 300)[128:]) == pytest.approx(link.best, rel=0.3)


def test_below_one_percent_only_if_that_is_allowed() -> None:
    link = Link(5 * MBIT)
    assert typical(follow(link, 200)[64:]) == 0.01
    less = typical(follow(link, 200, Budget(0.1, 0.0005))[64:])
    assert 0.1 / link.slope / TOLERANCE <= less <= 0.1 / link.slope * TOLERANCE


def test_a_density_that_is_right_is_seldom_probed() -> None:
    """Every 4 windows, then 8, 16, …: less than one step in ten has another density."""
    densities = follow(Link(100 * MBIT), 2000)
    settled = typical(densities)
    assert sum(density != settled for density in densities[64:]) < 0.1 * len(densities)


# Links that change.


def switched(before: Link, after: Link, at: int, back: int) -> World:
    return lambda step, density: (after if at <= step < back else before)(step, density)


@pytest.mark.parametrize("offset", range(0, WINDOW, 3))
@pytest.mark.parametrize("at", [80, 160, 400])
def test_64_steps_after_a_link_drops_the_budget_is_kept_again(at: int, offset: int) -> None:
    """From 1 Gbit/s to 50 Mbit/s, wherever in a window; when it rises, the density does, too."""
    fast, slow, at = Link(1000 * MBIT), Link(50 * MBIT), at + offset
    back = at + 300
    densities = follow(switched(fast, slow, at, back), back + 300)
    assert typical(densities[at - 16 : at]) >= fast.best / TOLERANCE
    assert all(slow.cost(density) <= 0.1 * TOLERANCE for density in densities[at + 64 : back])
    assert typical(densities[at + 64 : back]) >= slow.best / TOLERANCE
    assert typical(densities[back + 64 :]) >= fast.best / TOLERANCE


@pytest.mark.parametrize("offset", range(0, WINDOW, 3))
def test_a_rise_of_latency_costs_density_for_a_few_windows_only(offset: int) -> None:
    """It looks like a slower link until it is probed."""
    before, after, at = Link(200 * MBIT, 0.01), Link(200 * MBIT, 0.09), 160 + offset
    densities = follow(switched(before, after, at, 10**6), at + 300)
    assert typical(densities[at + 96 :]) >= before.best / TOLERANCE


@pytest.mark.parametrize("faster", [0.25, 4.0])
def test_a_step_that_changes_its_length_changes_the_budget(faster: float) -> None:
    """Another batch size, say: the link is the same, and a share of the step is something else."""
    before, after = Link(100 * MBIT), Link(100 * MBIT, base=faster)
    densities = follow(switched(before, after, 160, 10**6), 400)
    assert typical(densities[260:]) == pytest.approx(after.best, rel=TOLERANCE - 1)


# Noise.


def noisy(link: Link, spread: float, seed: int) -> World:
    """Disturbances only make a step longer: most by little, every tenth by five times as much."""
    source = random.Random(seed)

    def world(step: int, density: float) -> tuple[float, float]:
        exposed, period = link(step, density)
        more = link.base * spread * source.random() * (5 if source.random() < 0.1 else 1)
        return exposed + more, period + more + link.base * spread * source.random()

    return world


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spread", [0.02, 0.05])
@pytest.mark.parametrize("rate", [50, 200, 500])
def test_noise_does_not_lead_far_away(rate: float, spread: float, seed: int) -> None:
    link = Link(rate * MBIT)
    densities = follow(noisy(link, spread, seed), 600)[64:]
    costs = [link.cost(density) for density in densities]
    assert 0.05 <= fmean(costs) <= 0.15
    assert sum(cost > 0.2 for cost in costs) < 0.1 * len(costs)


# One window.

PROBE = [Measured(0.01, 0.006, 0.106)] * 7 + [Measured(0.04, 0.012, 0.112)] * 7
"""2 ms for each percent, 4 ms of fixed costs, 104 ms besides: 10.4 ms are allowed."""


def test_a_probe_gives_slope_and_fixed_costs() -> None:
    chosen = decide(Course.first(128, BUDGET), PROBE, BUDGET)
    assert chosen is not None
    assert chosen.costs.slope == pytest.approx(0.2)
    assert chosen.costs.fixed == pytest.approx(0.004)
    assert chosen.costs.base == pytest.approx(0.104)
    assert chosen.density == pytest.approx(0.052)
    assert chosen.probing  # 5.2 % is more than was measured


@pytest.mark.parametrize("missing", [PROBE[:7], PROBE[7:], PROBE[:9], PROBE[5:], []])
def test_too_few_steps_decide_nothing(missing: list[Measured]) -> None:
    assert decide(Course.first(128, BUDGET), missing, BUDGET) is None


def test_a_few_disturbed_steps_change_nothing() -> None:
    disturbed = [*PROBE[:3], *[m._replace(exposed=9.0) for m in PROBE[3:6]], *PROBE[6:-3]]
    disturbed += [m._replace(exposed=5.0, period=99.0) for m in PROBE[-3:]]
    one, other = (decide(Course.first(0, BUDGET), steps, BUDGET) for steps in (PROBE, disturbed))
    assert one is not None
    assert other is not None
    assert one.density == pytest.approx(other.density)


SENTENCES = (
    (Costs(0.004, 0.2, 0.104), 0.052, "it takes 10.4 ms of the budget of 10.4 ms (10 % of a step); 4 ms are"),
    (Costs(0.035, 0.2, 0.104), 0.01, "fixed costs alone (latency, control messages, selection: 35 ms) exceed"),
    (Costs(0.004, 3.0, 0.104), 0.01, "it is the smallest that is chosen, unless min_density= is given"),
    (Costs(0.004, 0.0, 0.104), 0.25, "it is the largest that is chosen"),
)


@pytest.mark.parametrize(("costs", "density", "words"), SENTENCES)
def test_a_decision_is_explained(costs: Costs, density: float, words: str) -> None:
    assert words in explain(Course(0, density, False, costs), BUDGET)


# All ranks.

AUTO = Settings(oktopk.ALGORITHMS["oktopk"](), "auto", warmup_steps=3)


@given(seed=st.integers(0, 10**6), world=st.integers(1, 4))
def test_all_ranks_choose_the_same_whatever_their_clocks_say(seed: int, world: int) -> None:
    """Also those who only hear of a decision."""

    def job(comm: oktopk.Communicator) -> list[float | None]:
        tuner, told, found, clock = Autotune(AUTO), Autotune(AUTO), [], 0.0
        source = random.Random(f"{seed} {comm.rank}")
        assert tuner.budget is not None
        for step in range(100):
            density = tuner.density(step)
            assert told.density(step) == density == tuner.density(step)
            found.append(density)
            clock += source.random()
            tuner.budget.record(step, density, source.random(), clock)
            if tuner.budget.decides_after(step):
                tuner.budget.decide(comm, step)
            told.load_state_dict(json.loads(json.dumps(tuner.decision())))
        return found

    by_rank = on_ranks(world, job)
    assert all(found == by_rank[0] for found in by_rank)
    assert by_rank[0][:3] == [None] * 3


@pytest.mark.parametrize("late", [0, 1, 2])
def test_waiting_for_late_ranks_does_not_count(late: int) -> None:
    """The last one waits for nobody: the others' times do not matter."""
    link = Link(100 * MBIT)

    def job(comm: oktopk.Communicator) -> list[float]:
        budget, clock, found = DensityBudget(AUTO, 0), 0.0, []
        for step in range(96):
            found.append(budget.density(step))
            exposed, period = link(step, found[-1])
            waits = 0.0 if comm.rank == (late + step // 5) % 3 else 0.2 + 0.3 * (step % 3)
            clock += period
            budget.record(step, found[-1], exposed + waits, clock)
            if budget.decides_after(step):
                budget.decide(comm, step)
        return found

    alone = follow(link, 96)
    for found in on_ranks(3, job):
        assert typical(found[64:]) == pytest.approx(typical(alone[64:]))


# In a run.


def set_world(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    record, clocks = DensityBudget.record, dict[int, float]()

    def faked(budget: DensityBudget, step: int, density: float | None, exposed: float, ended: float) -> None:
        assert exposed > 0
        assert ended > 0
        exposed, period = world(step, density or 0.0)
        clocks[id(budget)] = clocks.get(id(budget), 0.0) + period
        record(budget, step, density, exposed, clocks[id(budget)])

    monkeypatch.setattr(DensityBudget, "record", faked)


@dataclass(frozen=True)
class Ran:
    results: list[stepping.Grads]
    targets: list[int]
    schedule: list[tuple[int, float | None]]
    state: stepping.State
    stats: dict[str, float]


def run_on(comm: oktopk.Communicator, steps: int, **options: Any) -> Ran:
    results, targets = [], []
    with reducer_on(comm, **{"warmup_steps": 3, **options}) as reducer:
        for step in range(steps):
            results.append(reducer.sync(gradients(comm.rank, step)))
            assert reducer.last is not None
            targets.append(reducer.last.target_count)
        return Ran(results, targets, reducer.schedule, reducer.state_dict(), reducer.stats())


DROP = switched(Link(1000 * MBIT), Link(50 * MBIT), 60, 140)


def replays(world: int, steps: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Ran, Ran]]:
    """By rank: a run whose densities follow the clock, and its repetition, for which there is none."""
    set_world(monkeypatch, DROP)
    first = on_ranks(world, lambda comm: run_on(comm, steps, **options))

    def forbidden(*_: Any) -> None:
        raise AssertionError("a repeated run measures nothing")

    monkeypatch.setattr(DensityBudget, "record", forbidden)
    monkeypatch.setattr(Autotune, "decide", forbidden)
    again = on_ranks(world, lambda comm: run_on(comm, steps, **{**options, "density": first[comm.rank].schedule}))
    return list(zip(first, again, strict=True))


def assert_same_run(one: Ran, other: Ran) -> None:
    assert one.schedule == other.schedule
    assert one.targets == other.targets
    assert all(same_bits(a, b) for a, b in zip(one.results, other.results, strict=True))
    stepping.assert_same_state(one.state, other.state, but=["autotune"])


LAYOUTS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "fused buckets": {"buckets": [["a"], ["b"], ["c"], ["d"]], "fusion_entries": 2},
    "a ramp": {"ramp_steps": 5, "min_density": 0.02},
    "dense or sparse": {"auto": True, "buckets": stepping.SEVERAL},
    "a cheap warm-up": {"warmup_steps": None, "total_steps": 200, "warmup_values": "bf16"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_repeats_to_the_bit_from_its_schedule(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for first, again in replays(2, 200, monkeypatch, density="auto", **LAYOUTS[layout]):
        densities = {density for _, density in first.schedule}
        assert len(densities) > 5
        assert_same_run(first, again)


def test_a_fixed_density_repeats_to_the_bit_from_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"density": 0.05, "ramp_steps": 4, **LAYOUTS["fused buckets"]}
    for first, again in replays(2, 12, monkeypatch, **options):
        assert first.schedule[0] == (0, None)
        assert first.schedule[-1] == (7, 0.05)
        assert_same_run(first, again)


@pytest.mark.parametrize("warmup_values", ["fp32", "bf16"])
def test_a_default_warm_up_repeats_to_the_bit_from_its_schedule(
    warmup_values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"density": None, "warmup_steps": None, "total_steps": 200, "warmup_values": warmup_values}
    for first, again in replays(2, 24, monkeypatch, **options):
        assert first.schedule[:2] == [(0, None), (2, 0.25)]
        assert_same_run(first, again)


def test_events_stats_and_log_have_the_density(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_world(monkeypatch, DROP)
    with caplog.at_level(logging.INFO, logger="oktopk"):
        ran, other = on_ranks(2, lambda comm: run_on(comm, 132, density="auto", fusion_entries=10**9))
    assert ran.schedule == other.schedule
    assert ran.schedule[:3] == [(0, None), (3, 0.01), (11, 0.04)]
    for step, density in ran.schedule[1:]:
        assert density is not None
        assert ran.targets[step] == max(1, int(density * stepping.SIZE))
    assert ran.stats["chosen_density"] == ran.schedule[-1][1]
    assert 0 < ran.stats["density_seconds"] <= TOLERANCE * ran.stats["budget_seconds"]
    said = [message for message in caplog.messages if "oktopk: density" in message]
    assert said[0].startswith("oktopk: density 16 % from step 19 on: it takes ")
    assert any(f"density {100 * ran.stats['chosen_density']:.3g} % from step" in message for message in said)
    assert len(said) < 10  # by rank 0 alone, and only what changes


def test_skipped_and_dense_steps_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of one density are left: nothing is decided, and the probe is done again."""
    set_world(monkeypatch, Link(1000 * MBIT))

    def job(comm: oktopk.Communicator) -> list[tuple[int, float | None]]:
        with reducer_on(comm, density="auto", warmup_steps=0) as reducer:
            for step in range(2 * WINDOW):
                grads = gradients(comm.rank, step)
                if 8 <= step < 16:
                    grads["c"][0, 0] = float("nan")
                reducer.sync(grads)
            return reducer.schedule

    assert on_ranks(2, job) == [[(0, 0.01), (8, 0.04), (16, 0.01), (24, 0.04)]] * 2


def test_where_training_stays_dense_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    set_world(monkeypatch, Link(1000 * MBIT))
    record = Autotune.record
    monkeypatch.setattr(
        Autotune, "record", lambda self, step, dense, _: record(self, step, dense, 1.0 if dense else 2.0)
    )

    def job(comm: oktopk.Communicator) -> tuple[list[tuple[int, float | None]], int]:
        rounds = 0
        with reducer_on(comm, density="auto", warmup_steps=4, auto=True) as reducer:
            for step in range(120):
                reducer.sync(gradients(comm.rank, step))
                assert reducer.last is not None
                rounds += any(operation.phase == "density" for operation in reducer.last.traffic)
            return reducer.schedule, rounds

    for schedule, rounds in on_ranks(2, job):
        assert schedule[-1] == (4 + 2 * WINDOW + 8, None)
        assert rounds == 3


@pytest.mark.parametrize("saved_at", [2, 10, 40, 75])
def test_a_resumed_run_goes_on_with_its_density(saved_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_world(monkeypatch, Link(100 * MBIT))

    def job(comm: oktopk.Communicator) -> None:
        options: dict[str, Any] = {"density": "auto", "warmup_steps": 3}
        with reducer_on(comm, **options) as first:
            stepping.record_steps(first, comm.rank, range(saved_at))
            state = stepping.through_a_file(first.state_dict())
        with reducer_on(comm, **options) as second:
            second.load_state_dict(state)
            stepping.assert_same_state(state, second.state_dict())
            stepping.record_steps(second, comm.rank, range(saved_at, 160))
            assert second.schedule[: len(state["schedule"])] == [tuple(pair) for pair in state["schedule"]]
            best = Link(100 * MBIT).best
            assert best / TOLERANCE <= second.stats()["chosen_density"] <= best * TOLERANCE

    on_ranks(2, job)


def test_members_of_a_host_follow_their_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    set_world(monkeypatch, DROP)
    first, *rest = on_ranks(4, lambda comm: run_on(comm, 120, density="auto", ranks_per_host=2))
    assert len(first.schedule) > 5
    for other in rest:
        assert other.schedule == first.schedule
        assert all(same_bits(a, b) for a, b in zip(first.results, other.results, strict=True))


# Thresholds.


def wide(rank: int, step: int) -> torch.Tensor:
    """Heavy-tailed, and partly the same on all ranks."""
    own, common = (torch.Generator().manual_seed(1000 * step + r) for r in (rank, 999))
    return torch.randn(20_000, generator=own).pow(3) + torch.randn(20_000, generator=common).pow(3)


@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_thresholds_follow_a_density_that_jumps(algorithm: str) -> None:
    """By a factor of 4, as in a probe: what a rank sends is in the band at once, and Ok-Topk's thresholds, which
    it evaluates exactly every 32 steps, are tracked over the jump."""
    pairs = [(0, 0.01), (8, 0.04), (16, 0.01), (24, 0.035), (32, 0.01)]
    switches = {step for step, _ in pairs}

    def job(comm: oktopk.Communicator) -> None:
        low, high = oktopk.ALGORITHMS[algorithm].band
        with oktopk.AllReducer(
            [("w", torch.zeros(20_000, requires_grad=True))], algorithm, pairs, comm, warmup_steps=0
        ) as reducer:
            for step in range(40):
                reducer.sync({"w": wide(comm.rank, step)})
                assert reducer.last is not None
                (event,) = reducer.last.reductions
                k = int(20_000 * dict(pairs)[max(s for s in switches if s <= step)])
                assert event.target_count == k
                assert low * k <= event.local_count <= high * k
                if algorithm == "oktopk" and step not in switches:
                    assert not event.exact

    on_ranks(2, job)


def test_groups_and_their_thresholds_outlast_a_change_of_density() -> None:
    """They are fused by the smallest density."""
    options: dict[str, Any] = {"buckets": [["a"], ["b"], ["c"], ["d"]], "fusion_entries": 8, "warmup_steps": 1}
    steps = stepping.run_steps(2, 7, density=[(0, 0.05), (3, 0.25), (5, 0.06)], **options)
    groups = [[group["buckets"] for group in step[0].after["groups"]] for step in steps[1:]]
    assert groups == [[[0, 1, 2], [3]]] * 6
    assert [step[0].after["groups"][0]["tracking"]["steps"] for step in steps[1:]] == [1, 2, 3, 4, 5, 6]


# Densities as pairs.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "at least one pair"),
        ([(0, 0.1), (0, 0.2)], r"steps that rise from 0 or later, got \(0, 0.2\)"),
        ([(-1, 0.1)], "steps that rise"),
        ([(0.0, 0.1)], "steps that rise"),
        ([(0, 1.5)], r"densities in \(0, 1\] or None, got \(0, 1.5\)"),
        ([(0, "auto")], r"densities in \(0, 1\]"),
        ([0.1, 0.2], r"pairs \(step, density\), got 0.1"),
        (["ab"], "pairs"),
        ("automatic", "'auto', or a sequence of pairs"),
    ],
)
def test_a_wrong_sequence_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reducer_on(None, density=wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": 0.0}, r"budget must be in \(0, 1\], got 0.0"),
        ({"budget": "10 %"}, r"budget must be in \(0, 1\]"),
        ({"min_density": 0.3}, r"min_density must be in \(0, 0.25\], got 0.3"),
        ({"min_density": None}, "min_density must be"),
    ],
)
def test_a_wrong_budget_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reducer_on(None, density="auto", **wrong)


@given(
    pairs=st.dictionaries(st.integers(0, 50), st.none() | st.floats(0.001, 1.0), min_size=1),
    warmup=st.integers(0, 20),
)
def test_a_schedule_is_what_its_pairs_say(pairs: dict[int, float | None], warmup: int) -> None:
    ordered = tuple(sorted(pairs.items()))
    schedule = Schedule(ordered, warmup, ramp_steps=7)
    for step in range(60):
        known = [density for start, density in ordered if start <= step] or [ordered[0][1]]
        assert schedule.density_at(step) == (None if step < warmup else known[-1])
    sparse = [step for step in range(40) if schedule.density_at(step) is not None]
    assert list(schedule.sparse_steps(40)) == sparse
