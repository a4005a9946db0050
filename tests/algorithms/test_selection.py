"""What is selected: the exact top k, about k by a tracked threshold, or about k by a normal fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk.algorithms.selection import (
    Chosen,
    TrackedSelection,
    Tracker,
    exact_top_k,
    hard_cap,
    nearest_edge,
    select_exact,
    select_gaussian,
    target_count,
)
from oktopk.feedback.accumulator import Accumulator
from oktopk.kernels import SLOPE_STEP, SMALLEST, Backend, backend, reference
from oktopk.wire.sparse_vector import SparseVector

INF = math.inf
BACKENDS = [backend(torch.empty(0)), reference]
every_backend = pytest.mark.parametrize("kernels", BACKENDS, ids=["cpu", "reference"])

small = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, SMALLEST, -SMALLEST, SMALLEST / 2, 3e38, -3e38])
tied = st.lists(small, min_size=1, max_size=60).map(lambda x: torch.tensor(x, dtype=torch.float32))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=seeded(seed))


def heavy(size: int, seed: int = 0) -> Tensor:
    """Normal over uniform: a tail that falls like 1/x²."""
    return normal(size, seed) / torch.rand(size, generator=seeded(seed + 1)).clamp_(min=1e-6)


def bits(x: Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


def accumulator(x: Tensor, kernels: Backend | None = None, residual: Tensor | None = None) -> Accumulator:
    acc = Accumulator([x.clone()], [] if residual is None else [residual])
    acc.kernels = kernels or acc.kernels
    return acc


def top_indices(x: Tensor, k: int) -> list[int]:
    """The definition: by magnitude, then by lowest index; what is as good as zero only if all go."""
    magnitude = x.abs().tolist()
    order = sorted(range(len(magnitude)), key=lambda i: (-magnitude[i], i))[:k]
    return sorted(i for i in order if k == len(magnitude) or magnitude[i] >= SMALLEST)


def assert_top_k(chosen: Chosen, x: Tensor, k: int) -> None:
    assert chosen.finite
    assert chosen.vector.indices.tolist() == top_indices(x, k)
    assert bits(chosen.vector.values) == bits(x[chosen.vector.indices.long()])


# --- counts --------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.floats(1e-6, 1.0))
def test_target_count_is_the_density_of_the_size(size: int, density: float) -> None:
    k = target_count(size, density)
    assert 1 <= k <= size
    assert k == 1 or k <= size * density < k + 1
    assert target_count(0, density) == 0
    assert target_count(size, 1.0) == size


# --- accumulator ---------------------------------------------------------------------------------------------

ODD = torch.tensor([0.0, -0.0, 1.0, SMALLEST / 2, 3e38, INF, -INF, math.nan, 1e-45, -2.0])


@every_backend
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 97])
def test_values_are_residual_plus_gradient(kernels: Backend, size: int) -> None:
    """Formed once, by whichever pass comes first; without a residual they are the gradient."""
    grad, residual = heavy(size), normal(size)
    for passes in range(3):
        acc = accumulator(grad, kernels, residual.clone())
        for _ in range(passes):
            acc.select(1.0, size)
        assert bits(acc.values) == bits(residual + grad)
        assert acc.size == size
    assert bits(accumulator(grad, kernels).values) == bits(grad)


@every_backend
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_roll_back_restores_the_residual_to_the_bit(kernels: Backend, passes: int) -> None:
    """Whether or not the gradient was absorbed yet, and whatever was in either of them; the result is zeros."""
    residual, grad = ODD.repeat(10), ODD.repeat_interleave(10)
    before = bits(residual)
    acc = accumulator(grad, kernels, residual)
    for _ in range(passes):
        acc.select(0.5, 10)
    acc.rollback()
    assert bits(residual) == before
    assert acc.works[0].count_nonzero() == 0


@every_backend
def test_roll_back_without_a_residual_leaves_zeros(kernels: Backend) -> None:
    acc = accumulator(heavy(97), kernels)
    acc.select(1.0, 97)
    acc.rollback()
    assert bits(acc.works[0]) == [0] * 97


@every_backend
def test_release_takes_what_left(kernels: Backend) -> None:
    """Residual plus what was released is what was there; a negative entry comes back."""
    residual, grad = normal(97), normal(97, 1)
    acc = accumulator(grad, kernels, residual)
    whole = acc.values.clone()
    leaving = acc.vector(acc.select(1.0, 97))
    returned = leaving[:2].with_values(-leaving.values[:2])
    acc.release([leaving, returned])
    assert torch.equal(residual + leaving[2:].dense(), whole)
    assert (residual[leaving.indices[2:].long()] == 0).all()


@every_backend
@pytest.mark.parametrize("world", [1, 3, 4])
def test_finish_leaves_the_mean(kernels: Backend, world: int) -> None:
    """The count returned is that of the non-zeros, also when parts overlap and cancel."""
    acc = accumulator(heavy(10), kernels, torch.zeros(10))
    left = SparseVector(torch.tensor([1, 4, 7], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]), 10)
    right = SparseVector(torch.tensor([4, 7, 9], dtype=torch.int32), torch.tensor([5.0, -3.0, 0.0]), 10)
    assert acc.write_mean([left, right], world) == int(acc.works[0].count_nonzero()) == 2
    assert torch.allclose(acc.works[0], (left.dense() + right.dense()) / world)
    assert acc.write_mean([], world) == acc.works[0].count_nonzero() == 0


def test_finish_dense_sends_everything() -> None:
    residual, mean = normal(10), torch.arange(10.0)
    acc = accumulator(heavy(10), None, residual)
    acc.write_dense_mean(mean)
    assert torch.equal(acc.works[0], mean)
    assert residual.count_nonzero() == 0
    acc.write_dense_mean(acc.works[0])
    assert torch.equal(acc.works[0], mean)


# --- exact top-k ---------------------------------------------------------------------------------------------


@every_backend
@given(x=tied, data=st.data())
def test_exact_top_k(kernels: Backend, x: Tensor, data: st.DataObject) -> None:
    """The definition above, whatever an earlier pass found: all of the top k, some of it, or nothing."""
    k = data.draw(st.integers(1, x.numel()))
    earlier = data.draw(st.sampled_from([INF, SMALLEST, 1.0, 1.5, 2.0]))
    capacity = data.draw(st.sampled_from([0, 1, k, 2 * k, 100]))
    acc = accumulator(x, kernels)
    assert_top_k(exact_top_k(acc, k, acc.select(earlier, capacity)), x, k)


@every_backend
@given(x=tied, data=st.data())
def test_select_exact_whatever_the_last_threshold(kernels: Backend, x: Tensor, data: st.DataObject) -> None:
    """Where to look first is a hint and nothing more."""
    k = data.draw(st.integers(1, x.numel()))
    last = data.draw(st.sampled_from([None, 0.0, 1e-45, SMALLEST, 1.0, 2.0, 1e38, INF]))
    assert_top_k(select_exact(accumulator(x, kernels), k, last), x, k)


@every_backend
@pytest.mark.parametrize("last", [None, 0.0, 1e-45, SMALLEST, 1.0])
def test_what_is_as_good_as_zero_is_not_sent(kernels: Backend, last: float | None) -> None:
    """Wherever the search begins."""
    x = torch.tensor([0.95 * SMALLEST, 0.0, 1.0, -0.99 * SMALLEST])
    assert_top_k(select_exact(accumulator(x, kernels), 2, last), x, 2)


@every_backend
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 1009])
def test_the_threshold_is_the_smallest_magnitude_chosen(kernels: Backend, n: int) -> None:
    """So that the next step may start from it."""
    x = heavy(n)
    for k in {1, n // 2 or 1, n - 1 or 1}:
        for last in (None, 0.5, 1e-3):
            chosen = select_exact(accumulator(x, kernels), k, last)
            assert_top_k(chosen, x, k)
            assert k == n or chosen.threshold == float(chosen.vector.values.abs().min())


@every_backend
@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_nothing_is_chosen_from_what_is_not_finite(kernels: Backend, bad: float) -> None:
    x = normal(50)
    x[37] = bad
    tracked = TrackedSelection(8).select
    for choose in (
        lambda acc: select_exact(acc, 5, None),
        lambda acc: select_exact(acc, 5, 1.0),
        lambda acc: select_gaussian(acc, 5),
        lambda acc: tracked(acc, 5, None)[0],
        lambda acc: tracked(acc, 5, Tracker(1.5, 5))[0],
    ):
        chosen = choose(accumulator(x, kernels, torch.zeros(50)))
        assert not chosen.finite
        assert len(chosen.vector) == 0


# --- tracker -------------------------------------------------------------------------------------------------

trackers = st.builds(Tracker, st.floats(1e-20, 1e20), st.integers(1, 10**6), st.floats(0.3, 30.0))


@given(trackers, st.integers(1, 10**6))
def test_the_threshold_moves_towards_k_within_bounds(tracker: Tracker, k: int) -> None:
    """Up if too many were found, down if too few, never by more than a factor of two."""
    following = tracker.threshold_for(k)
    assert tracker.threshold / 2 <= following <= tracker.threshold * 2
    assert (following >= tracker.threshold) == (tracker.count >= k)
    assert replace(tracker, count=2 * tracker.count).threshold_for(k) >= following


@given(trackers)
def test_the_right_count_keeps_the_threshold(tracker: Tracker) -> None:
    assert tracker.threshold_for(tracker.count) == tracker.threshold
    assert replace(tracker, count=0).threshold_for(5) == tracker.threshold


@given(st.floats(0.5, 20.0), st.integers(100, 10**5), st.floats(0.8, 1.25))
def test_a_power_law_is_followed_exactly(slope: float, k: int, off: float) -> None:
    """If counts fall like threshold^-slope, one correction leads to k."""
    tracker = Tracker(1.0, round(off * k), slope)
    assert tracker.count * tracker.threshold_for(k) ** -slope == pytest.approx(k, rel=1e-9)


@given(st.floats(0.5, 20.0))
def test_the_slope_is_learnt(slope: float) -> None:
    """Half of the way on each step."""
    tracker = Tracker(1.0, 10**6)
    for _ in range(20):
        tracker = tracker.with_slope(10**6, round(10**6 * SLOPE_STEP**-slope))
    assert tracker.slope == pytest.approx(slope, rel=0.01)


@given(trackers, st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_slope_stays_within_reason(tracker: Tracker, count: int, above: int) -> None:
    """Also for counts that say nothing: too few, none above, all above."""
    measured = tracker.with_slope(max(count, above), above)
    assert 0.3 <= measured.slope <= 30.0
    assert count >= 32 or above >= 32 or measured.slope == tracker.slope
    assert replace(measured, slope=tracker.slope) == tracker


def test_the_age_counts_the_steps_since_the_last_exact_one() -> None:
    tracker = Tracker(1.0, 10)
    assert [tracker.age, (older := tracker.after(2.0, 9, exact=False)).age] == [0, 1]
    assert older.after(3.0, 8, exact=False).age == 2
    assert older.after(3.0, 8, exact=True) == Tracker(3.0, 8, age=0)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 300))
def test_nearest_edge_comes_nearest(counts: list[int], k: int) -> None:
    """No other bin leaves a number of entries nearer to k."""
    best, count = nearest_edge(counts, k)
    assert count == sum(counts[best:])
    assert all(abs(count - k) <= abs(sum(counts[j:]) - k) for j in range(len(counts)))


# --- tracked selection ---------------------------------------------------------------------------------------


class Following:
    """A tracked selection over many steps, with the laws of each single one."""

    def __init__(self, k: int, kernels: Backend, exact_every: int = 8) -> None:
        self.k, self.kernels = k, kernels
        self.selection = TrackedSelection(exact_every)
        self.tracker: Tracker | None = None
        self.exact: list[bool] = []

    def step(self, x: Tensor, residual: Tensor | None = None) -> SparseVector:
        acc = accumulator(x, self.kernels, residual)
        chosen, self.tracker = self.selection.select(acc, self.k, self.tracker)
        self.exact.append(chosen.exact)
        if chosen.exact:
            assert_top_k(chosen, acc.values, self.k)
        else:
            assert (
                chosen.vector.indices.tolist()
                == reference.select(acc.values, chosen.threshold, x.numel()).indices.tolist()
            )
            assert chosen.threshold >= SMALLEST
        assert (self.tracker.threshold, self.tracker.count) == (chosen.threshold, len(chosen.vector))
        acc.release([chosen.vector])
        return chosen.vector


def in_band(count: int, k: int) -> bool:
    """At least one, because a selection of nothing would not notice that it should go lower."""
    return max(1, math.floor(0.8 * k)) <= count <= max(k, math.floor(1.25 * k)) == hard_cap(k)


@every_backend
@pytest.mark.parametrize("k", [1, 2, 5, 50, 997])
@pytest.mark.parametrize("drift", [0.9, 1.0, 1.1])
def test_the_count_stays_in_the_band(kernels: Backend, drift: float, k: int) -> None:
    """On heavy-tailed gradients with error feedback, that grow or shrink by a tenth from step to step."""
    following, residual = Following(k, kernels), torch.zeros(5003)
    for step in range(40):
        assert in_band(len(following.step(heavy(5003, step) * drift**step, residual)), k)
    assert all(any(following.exact[step : step + 8]) for step in range(33))


@every_backend
@pytest.mark.parametrize("k", [50, 997])
def test_most_steps_need_one_pass(kernels: Backend, k: int) -> None:
    """On steady gradients the threshold is evaluated exactly when it is due, and hardly ever else."""
    following, residual = Following(k, kernels, 10), torch.zeros(5003)
    for step in range(40):
        following.step(heavy(5003, step), residual)
    assert sum(following.exact) <= 8


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "a million times larger": lambda x: x * 1e6,
    "a million times smaller": lambda x: x * 1e-6,
    "twice as large": lambda x: x * 2,
    "half as large": lambda x: x / 2,
    "hardly any": lambda x: torch.where(torch.arange(x.numel()) < 200, x, 0.0),
    "subnormal but for a few": lambda x: torch.where(torch.arange(x.numel()) < 200, x, 1e-40),
    "all alike": lambda x: x.sign(),
    "as large as floats go": lambda x: 3.4e38 * (x / (1 + x.abs())),
}


@every_backend
@pytest.mark.parametrize("k", [1, 2, 10, 97])
@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_is_mended_at_once(kernels: Backend, jump: str, k: int) -> None:
    """The count is right on the very step, and on the ones that follow, and on the way back."""
    following = Following(k, kernels)
    for step in range(24):
        x = heavy(2003, step)
        assert in_band(len(following.step(JUMPS[jump](x) if 5 <= step < 15 else x)), k), step


@every_backend
@pytest.mark.parametrize("k", [1, 10, 97])
def test_nothing_to_send_and_then_something(kernels: Backend, k: int) -> None:
    """A gradient of zeros selects nothing; the next one is selected as if nothing had been."""
    following = Following(k, kernels)
    for step in range(20):
        chosen = following.step(heavy(997, step) if step % 4 else torch.zeros(997))
        assert in_band(len(chosen), k) if step % 4 else len(chosen) == 0


@every_backend
@pytest.mark.parametrize("k", [1, 31, 64, 700])
def test_among_equals_the_lowest_indices_go(kernels: Backend, k: int) -> None:
    """All are alike, and more than the band allows: exactly k of them."""
    following = Following(k, kernels)
    for step in range(12):
        assert following.step(heavy(997, step).sign()).indices.tolist() == list(range(k))


@every_backend
def test_everything_goes_if_all_is_asked_for(kernels: Backend) -> None:
    """Zeros too: k is the size."""
    following = Following(64, kernels)
    for step in range(12):
        assert len(following.step(torch.where(heavy(64, step) > 0, 1.0, 0.0))) == 64


@every_backend
@pytest.mark.parametrize("nonzero", [0, 1, 64, 79])
def test_zeros_are_never_sent(kernels: Backend, nonzero: int) -> None:
    """However long there is less to send than asked for, and however wide the band is."""
    following = Following(80, kernels, exact_every=64)
    x = torch.where(torch.arange(100) < nonzero, 1.0, 0.0)
    for _ in range(70):
        assert len(following.step(x)) == nonzero


# --- Gaussian selection --------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "heavy-tailed": heavy,
    "very heavy-tailed": lambda n: heavy(n) ** 5,
    "uniform": lambda n: torch.rand(n, generator=seeded(0)),
    "constant": lambda n: torch.full((n,), -0.3),
    "two magnitudes": lambda n: torch.where(normal(n) > 0.5, 1.0, 1000.0),
    "mean far below zero": lambda n: normal(n) - 100,
    "mean far above zero": lambda n: normal(n) * 1e-3 + 100,
    "one outlier": lambda n: torch.where(torch.arange(n) == n // 2, 1e30, normal(n)),
    "huge": lambda n: normal(n).clamp(-3, 3) * 1e38,
    "tiny": lambda n: normal(n) * 1e-34,
}


@every_backend
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [33, 5003])
def test_gaussian_selects_about_k(kernels: Backend, n: int, shape: str) -> None:
    """Two thirds to four thirds of k, all of them the largest, on whatever the gradient looks like."""
    x = SHAPES[shape](n)
    for k in {1, 2, n // 100 or 1, n // 10, n // 2, n - 1, n}:
        chosen = select_gaussian(accumulator(x, kernels), k)
        assert math.ceil(2 * k / 3) <= len(chosen.vector) <= max(k, math.floor(4 * k / 3)), k
        assert float(chosen.vector.values.abs().min()) >= np.float32(chosen.threshold)
        assert_top_k(chosen, x, len(chosen.vector))


@every_backend
@given(x=tied, data=st.data())
def test_gaussian_never_selects_more(kernels: Backend, x: Tensor, data: st.DataObject) -> None:
    """Ties and zeros may leave less to select, never more; zeros are never among it unless all is asked for."""
    k = data.draw(st.integers(1, x.numel()))
    chosen = select_gaussian(accumulator(x, kernels), k)
    worth_sending = int((x.abs() >= SMALLEST).sum()) if k < x.numel() else k
    assert min(worth_sending, math.ceil(2 * k / 3)) <= len(chosen.vector) <= max(k, math.floor(4 * k / 3))
    assert k == x.numel() or (chosen.vector.values.abs() >= SMALLEST).all()


def test_residuals_that_grow_are_followed_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thin tail: where all entries grow by some percent, several times as many lie above the old threshold."""
    searches, search = [], Accumulator.kth_magnitude
    monkeypatch.setattr(Accumulator, "kth_magnitude", lambda acc, k: searches.append(k) or search(acc, k))
    random = torch.Generator().manual_seed(3)
    residual, tracker, k = torch.zeros(100_000), None, 1000
    for _ in range(30):
        acc = Accumulator([torch.randn(100_000, generator=random)], [residual])
        chosen, tracker = TrackedSelection(exact_every=1000).select(acc, k, tracker)
        assert in_band(len(chosen.vector), k)
    assert searches == [k]  # in the first step, when nothing is known yet
