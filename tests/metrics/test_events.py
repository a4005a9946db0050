"""The figures are those of the definitions, and buckets add up to steps."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.metrics.events import DENSE, SPARSE, ReductionEvent, Seconds, StepEvent, Volume, Wire, combine

LSTMAN4 = 27_569_568
counts = st.integers(0, 2**40)
durations = st.floats(0, 1e6)
wires = st.builds(Wire, counts, counts, counts, counts, counts, counts)
times = st.builds(Seconds, durations, durations, durations, durations, durations, durations)


def reduction(size: int = 1000, count: int | None = 10, **facts: Any) -> ReductionEvent:
    known: dict[str, Any] = {
        "step": 3,
        "bucket": 0,
        "phase": DENSE if count is None else SPARSE,
        "algorithm": "dense" if count is None else "oktopk",
        "volume": Volume.of(size, count),
        "target_count": size if count is None else 10,
        "local_count": size if count is None else 12,
        "threshold": 0.5,
        "global_threshold": 0.25,
        "exact": False,
        "residual_norm": 3.0,
        "wire": Wire(),
        "seconds": Seconds(),
        "slowest_rank": None,
        "skipped": False,
    }
    return ReductionEvent(**(known | facts))


def step(
    *reductions: ReductionEvent, start: float = 1.0, handed_over: float = 2.0, stop: float = 3.0
) -> StepEvent:
    return combine(3, reductions, skipped=False, culprits=(), start=start, handed_over=handed_over, stop=stop)


def test_a_dense_reduction_of_lstman4_sends_all_of_it() -> None:
    volume = Volume.of(LSTMAN4, None)
    assert (volume.sparsity, volume.ratio, volume.payload_bytes) == (0.0, 1.0, 110_278_272)


def test_a_sparse_reduction_sends_an_index_and_a_value_per_entry() -> None:
    k = 275_696
    volume = Volume.of(LSTMAN4, k)
    assert (volume.sparsity, volume.ratio, volume.payload_bytes) == (1 - k / LSTMAN4, LSTMAN4 / k, 8 * k)


def test_a_reduction_that_sends_nothing_divides_by_nothing() -> None:
    volume = Volume.of(LSTMAN4, 0)
    assert (volume.sparsity, volume.ratio, volume.payload_bytes) == (1.0, 1.0, 0)


def test_an_empty_bucket_divides_by_nothing() -> None:
    for volume in (Volume(), Volume.of(0, None), Volume.of(0, 0)):
        assert (volume.sparsity, volume.ratio, volume.payload_bytes) == (0.0, 1.0, 0)
    empty = reduction(0, 0, target_count=0, local_count=0)
    assert (empty.target_density, empty.local_density, empty.global_density) == (1.0, 1.0, 1.0)


@given(st.integers(1, 2**40), st.data())
def test_sparsity_is_what_the_global_density_leaves(size: int, data: st.DataObject) -> None:
    event = reduction(size, data.draw(st.integers(0, size)))
    assert event.volume.sparsity == pytest.approx(1 - event.global_density)
    assert 0 <= event.volume.sparsity <= 1 <= event.volume.ratio


@given(st.lists(st.tuples(counts, st.none() | counts), max_size=5))
def test_volumes_of_buckets_add_up_to_that_of_the_step(buckets: list[tuple[int, int | None]]) -> None:
    whole = step(*(reduction(size, count) for size, count in buckets)).volume
    kept = [size if count is None else count for size, count in buckets]
    assert (whole.size, whole.count) == (sum(size for size, _ in buckets), sum(kept))
    assert whole.payload_bytes == sum(4 * size if k is None else 8 * k for size, k in buckets)


@given(st.lists(st.tuples(wires, times, counts, counts), max_size=5))
def test_what_buckets_sent_and_took_adds_up_in_the_step(parts: list[tuple[Wire, Seconds, int, int]]) -> None:
    whole = step(*(reduction(wire=w, seconds=s, target_count=t, local_count=c) for w, s, t, c in parts))
    assert asdict(whole.wire) == {key: sum(asdict(part[0])[key] for part in parts) for key in asdict(Wire())}
    for key, value in asdict(whole.seconds).items():
        assert value == pytest.approx(sum(getattr(part[1], key) for part in parts))
    assert whole.seconds.total == pytest.approx(sum(asdict(whole.seconds).values()))
    assert whole.target_count == sum(part[2] for part in parts)
    assert whole.local_count == sum(part[3] for part in parts)


@given(st.lists(st.floats(0, 1e30), max_size=5))
def test_the_residual_of_a_step_is_that_of_all_buckets_together(norms: list[float]) -> None:
    whole = step(*(reduction(residual_norm=norm) for norm in norms))
    assert whole.residual_norm == pytest.approx(math.sqrt(sum(norm**2 for norm in norms)))


def test_a_norm_too_large_to_square_is_still_a_norm() -> None:
    assert step(reduction(residual_norm=1e200)).residual_norm == 1e200


@pytest.mark.parametrize(
    ("phases", "expected"), [((), DENSE), ((DENSE,), DENSE), ((DENSE, SPARSE), SPARSE), ((SPARSE, DENSE), SPARSE)]
)
def test_a_step_is_sparse_if_any_bucket_is(phases: tuple[str, ...], expected: str) -> None:
    assert step(*(reduction(phase=phase) for phase in phases)).phase == expected


def test_the_slowest_rank_is_the_known_one_that_is_waited_for_most() -> None:
    def part(wait: float, rank: int | None) -> ReductionEvent:
        return reduction(seconds=Seconds(wait=wait), slowest_rank=rank)

    assert step(part(0.1, 2), part(0.3, 5), part(0.2, 1)).slowest_rank == 5
    assert step(part(0.1, 2), part(0.3, None)).slowest_rank == 2
    busy = reduction(seconds=Seconds(exchange=9.0, wait=0.1), slowest_rank=4)
    assert step(busy, part(0.2, 1)).slowest_rank == 1  # a long reduction is not a long wait
    assert step(part(0.1, None)).slowest_rank is None
    assert step().slowest_rank is None


@pytest.mark.parametrize(
    ("busy", "handed_over", "exposed", "hidden"),
    [
        (2.0, 3.0, 0.0, 1.0),  # all beside backward
        (2.0, 1.0, 2.0, 0.0),  # all after it
        (2.0, 2.5, 0.5, 0.75),
        (2.0, 4.0, 0.0, 1.0),  # the last bucket came after the end of the others: nothing was waited for
        (0.5, 1.0, 2.0, 0.0),  # more was waited for than the reductions took
        (0.0, 3.0, 0.0, 0.0),  # nothing was done, so nothing was hidden
    ],
)
def test_hidden_is_what_was_not_exposed(busy: float, handed_over: float, exposed: float, hidden: float) -> None:
    event = step(reduction(seconds=Seconds(exchange=busy)), start=1.0, handed_over=handed_over, stop=3.0)
    assert (event.exposed, event.hidden_share) == (exposed, hidden)


def test_densities_of_a_step_are_over_all_its_entries() -> None:
    event = step(
        reduction(1000, 40, target_count=10, local_count=12), reduction(3000, 80, target_count=30, local_count=28)
    )
    assert (event.target_density, event.local_density, event.global_density) == (0.01, 0.01, 0.03)
    assert replace(event, volume=Volume()).target_density == 1.0
