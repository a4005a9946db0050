"""The compiled kernels equal the reference to the bit: selection and thresholds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk.kernels import SLOPE_STEP, SMALLEST, Backend, bin_edge, bin_of, cpu, reference
from oktopk.kernels.cpu.thresholds import SAMPLE_BLOCK, sample_positions, sampled_threshold
from tests.support.kernels.backends import every_kernels, fast_kernels
from tests.support.kernels.inputs import (
    BIG,
    INF,
    LARGEST,
    NAN,
    SIZES,
    SPECIAL,
    any_bits,
    assert_same_picked,
    bits,
    capacities,
    normal,
    normals,
    same_float,
    seeds,
    sizes,
    sparse_part,
    special_vector,
    spread,
    sums,
    thresholds,
    vectors,
)

# --- selection -----------------------------------------------------------------------------------------------


@fast_kernels
@given(st.data(), st.one_of(vectors, st.tuples(seeds, sizes).map(any_bits)), capacities)
def test_select_is_the_reference(fast: Backend, data: st.DataObject, x: Tensor, capacity: int) -> None:
    """Same indices, values, counts and flag; and the input is only read."""
    threshold = data.draw(thresholds(x))
    before = bits(x)
    found, expected = fast.select(x, threshold, capacity), reference.select(x, threshold, capacity)
    assert_same_picked(found, expected)
    assert bits(found.values) == bits(expected.values)
    assert bits(x) == before


@fast_kernels
@given(st.data(), sizes, seeds, capacities, st.booleans())
def test_accumulate_select_is_the_reference(
    fast: Backend, data: st.DataObject, size: int, seed: int, capacity: int, keep_old: bool
) -> None:
    """Same selection, same sums, and the same left behind in the gradient."""
    rng = np.random.default_rng(seed)
    pool = torch.cat([special_vector(SPECIAL), normal(20, seed)])
    residual, grad = (pool[torch.from_numpy(rng.integers(0, pool.numel(), size))] for _ in range(2))
    threshold = data.draw(thresholds(residual + grad))
    outcomes = []
    for kernels in (fast, reference):
        r, g = residual.clone(), grad.clone()
        outcomes.append((kernels.accumulate_select(r, g, threshold, capacity, keep_old), sums(r), bits(g)))
    assert_same_picked(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:] == outcomes[1][1:]


@fast_kernels
@given(st.one_of(vectors, st.tuples(seeds, sizes).map(any_bits)), st.sampled_from([1.0, 0.5, 1 / 3, 1 / 7]))
def test_scale_is_the_reference(fast: Backend, x: Tensor, factor: float) -> None:
    """Same products, and the same largest magnitude."""
    found, expected = x.clone(), x.clone()
    assert same_float(fast.scale_(found, factor), reference.scale_(expected, factor))
    assert sums(found) == sums(expected)


@every_kernels
@pytest.mark.parametrize("size", SIZES)
def test_scale_tells_the_largest_magnitude(kernels: Backend, size: int) -> None:
    x = spread(size, 3)
    largest = kernels.scale_(x, 0.25)
    assert bits(x) == bits(spread(size, 3) * 0.25)
    assert largest == max((abs(value) for value in x.tolist()), default=0.0)
    for place, bad in ((0, NAN), (size // 2, INF), (size - 1, -INF)) if size else ():
        x = spread(size, 3)
        x[place] = bad
        assert not math.isfinite(kernels.scale_(x, 0.25))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep_old", [False, True])
@every_kernels
def test_accumulate_adds_and_keeps_the_old(kernels: Backend, keep_old: bool, size: int) -> None:
    """residual += grad; the gradient stays, or becomes the old residual if that is to be kept."""
    residual, grad = spread(size, 1), spread(size, 2)
    r, g = residual.clone(), grad.clone()
    picked = kernels.accumulate_select(r, g, 1.0, size, keep_old)
    assert bits(r) == bits(residual + grad)
    assert bits(g) == bits(residual if keep_old else grad)
    assert_same_picked(picked, kernels.select(r, 1.0, size))


@every_kernels
@given(st.data(), vectors, capacities)
def test_what_picked_means(kernels: Backend, data: st.DataObject, x: Tensor, capacity: int) -> None:
    """The first entries at the threshold or above; counts of all of them, and of those 5 % above it."""
    threshold = data.draw(thresholds(x))
    finite = bool(x.isfinite().all())
    higher = np.float32(SLOPE_STEP) * np.float32(threshold)
    picked = kernels.select(x, threshold, capacity)
    assert picked.finite == finite
    if finite:
        found = np.flatnonzero(np.abs(x.numpy()) >= np.float32(threshold))
        assert picked.count == found.size
        assert picked.indices.tolist() == found[:capacity].tolist()
        assert bits(picked.values) == bits(x[picked.indices.long()])
        assert picked.above == int((np.abs(x.numpy()) >= higher).sum())


@pytest.mark.parametrize("size", [s for s in SIZES if s])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@every_kernels
def test_one_bad_number_is_seen_anywhere(kernels: Backend, bad: float, size: int) -> None:
    """Also by a pass that selects nothing, and when it comes out of the addition."""
    for place in {0, size // 2, size - 1}:
        x = torch.zeros(size)
        x[place] = bad
        assert not kernels.select(x, INF, 0).finite
        assert not kernels.accumulate_select(torch.ones(size), x, INF, 0, True).finite
        huge = torch.where(x == 0, 1.0, 3e38)
        assert kernels.select(huge, INF, 0).finite
        assert not kernels.accumulate_select(huge.clone(), huge, INF, 0).finite


@fast_kernels
@pytest.mark.parametrize("threshold", [LARGEST / 1.05, 3.3e38, LARGEST, 2 * LARGEST, 1e300, INF])
def test_thresholds_beyond_the_largest_float(fast: Backend, threshold: float) -> None:
    """A threshold, or 1.05 times it, that does not fit a float32 is infinity; nobody warns of it."""
    x = special_vector([1.0, 3.3e38, -LARGEST])
    assert_same_picked(fast.select(x, threshold, 3), reference.select(x, threshold, 3))
    indices = torch.arange(3, dtype=torch.int32)
    assert fast.filter_at_least(indices, x, threshold)[0].tolist() == fast.select(x, threshold, 3).indices.tolist()


@every_kernels
def test_a_large_world_has_64_bit_indices(kernels: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 2^31 entries do not fit this machine: pretend that this one is such a vector."""
    x = spread(1009)
    expected = kernels.select(x, 1.0, 100)
    assert expected.indices.dtype == torch.int32
    module = getattr(kernels, "module", sys.modules[kernels.select.__module__])
    monkeypatch.setattr(module, "index_dtype", lambda size: torch.int64)
    monkeypatch.setattr(reference, "index_dtype", lambda size: torch.int64)
    found = kernels.select(x, 1.0, 100)
    absorbed = kernels.accumulate_select(torch.zeros(1009), x.clone(), 1.0, 100, True)
    ties = kernels.first_equal(x.sign(), 1.0, 3)
    assert found.indices.dtype == absorbed.indices.dtype == ties.dtype == torch.int64
    assert found.indices.tolist() == absorbed.indices.tolist() == expected.indices.tolist()
    assert bits(found.values) == bits(absorbed.values) == bits(expected.values)
    assert ties.tolist() == [0, 1, 2]


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, NAN]), max_size=100), st.integers(0, 100))
def test_first_equal_takes_the_lowest_indices(elements: list[float], limit: int) -> None:
    """Signs do not matter, NaN equals nothing."""
    x = special_vector(elements)
    for magnitude in (0.0, 0.5, 1.0, 2.0):
        expected = [i for i, e in enumerate(elements) if abs(e) == magnitude][:limit]
        for kernels in (cpu, reference):
            assert kernels.first_equal(x, magnitude, limit).tolist() == expected


# --- thresholds ----------------------------------------------------------------------------------------------


@given(vectors, st.data())
def test_kth_magnitude_is_the_reference(x: Tensor, data: st.DataObject) -> None:
    if x.numel():
        k = data.draw(st.integers(1, x.numel()))
        assert same_float(cpu.kth_magnitude(x, k), reference.kth_magnitude(x, k))
        if not x.isnan().any():
            assert cpu.kth_magnitude(x, k) == float(x.abs().topk(k).values[-1])


def outside_the_sample() -> Tensor:
    """Large only where the sample does not look: every estimate is far too low."""
    x = normal(BIG).abs() + 100
    seen = torch.from_numpy(sample_positions(BIG))[:, None] + torch.arange(SAMPLE_BLOCK)
    x[seen.flatten()] = normal(seen.numel(), 1)
    return x


def inside_the_sample() -> Tensor:
    """Large only where the sample looks: every estimate is far too high."""
    x = normal(BIG)
    seen = torch.from_numpy(sample_positions(BIG))[:500, None] + torch.arange(SAMPLE_BLOCK)
    x[seen.flatten()] *= 1000
    return x


def mostly_zero() -> Tensor:
    x = torch.zeros(BIG)
    x[torch.arange(0, BIG, 5003)] = normal(BIG // 5003 + 1)
    return x


HARD: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(BIG),
    "heavy-tailed": lambda: spread(BIG + 1),
    "constant": lambda: torch.full((BIG,), -0.25),
    "zero": lambda: torch.zeros(BIG),
    "mostly zero": mostly_zero,
    "rising": lambda: spread(BIG).sort().values,
    "falling": lambda: spread(BIG).abs().sort(descending=True).values,
    "one lump": lambda: torch.cat([torch.zeros(BIG - 5000), normal(5000)]),
    "outside the sample": outside_the_sample,
    "inside the sample": inside_the_sample,
    "few magnitudes": lambda: normal(BIG).round(),
}


@pytest.mark.parametrize("name", HARD)
def test_kth_magnitude_is_exact_on_large_inputs(name: str) -> None:
    """The sample only says where to look: the answer is exact however much it misleads."""
    x = HARD[name]()
    order = x.abs().sort(descending=True).values
    for k in (1, 2, 97, 5243, BIG // 4, BIG // 4 + 1, x.numel()):
        assert cpu.kth_magnitude(x, k) == float(order[k - 1]), k
    k = 5243
    assert reference.kth_magnitude(x, k) == float(order[k - 1])


@pytest.mark.parametrize("margin", [0.0, 1.5, 8.0, 1e9])
def test_sampled_threshold_is_an_order_statistic_of_the_sample(margin: float) -> None:
    x = spread(BIG)
    seen = torch.from_numpy(sample_positions(BIG))[:, None] + torch.arange(SAMPLE_BLOCK)
    order = x[seen.flatten()].abs().sort(descending=True).values
    for k in {1, BIG // 100, BIG}:
        expected = k * order.numel() / BIG
        rank = min(order.numel(), max(1, round(expected + 3 * margin * expected**0.5)))
        assert sampled_threshold(x, k, margin) == float(order[rank - 1])


def test_sampled_threshold_is_a_fair_estimate() -> None:
    """At 1 % density the count above the estimate is within a few per cent of k."""
    x, k = normal(BIG), BIG // 100
    count = int((x.abs() >= sampled_threshold(x, k)).sum())
    assert 0.9 * k < count < 1.1 * k
    assert sampled_threshold(x, k, 3.0) < sampled_threshold(x, k)


@every_kernels
@given(
    vectors,
    st.sampled_from([0, 1, 200, 0x3F80 << 1, 0x7F7F << 1, 0x7F80 << 1]),
    st.sampled_from([1, 2, 128, 5000]),
)
def test_magnitude_histogram_counts_by_bins(kernels: Backend, x: Tensor, first: int, bins: int) -> None:
    """Bin j holds the magnitudes from its edge to the next; the last one all above; those below are left out."""
    edges = np.array([bin_edge(first + j) for j in range(bins)], np.float32)
    magnitude = np.abs(x.numpy())
    found = kernels.magnitude_histogram(x, first, bins)
    assert len(found) == bins
    assert found == reference.magnitude_histogram(x, first, bins)
    if np.isfinite(magnitude).all() and np.isfinite(edges).all():
        at_least = [int((magnitude >= edge).sum()) for edge in edges]
        assert list(accumulate(reversed(found)))[::-1] == at_least


@given(st.one_of(st.floats(0, 2.0**127, width=32), st.sampled_from([0.0, SMALLEST, 1.0, LARGEST, INF])))
def test_a_magnitude_lies_in_its_bin(magnitude: float) -> None:
    index = bin_of(magnitude)
    assert bin_edge(index) <= magnitude
    assert math.isinf(magnitude) or magnitude < bin_edge(index + 1)
    assert bin_of(bin_edge(index)) == index


@every_kernels
@given(st.data(), vectors, st.sampled_from([torch.int32, torch.int64]))
def test_filter_keeps_what_reaches_the_threshold(
    kernels: Backend, data: st.DataObject, x: Tensor, dtype: torch.dtype
) -> None:
    """In order, and the input is only read; a NaN reaches nothing."""
    threshold = data.draw(thresholds(x))
    indices = torch.arange(x.numel(), dtype=dtype) * 3
    expected = [i for i, m in enumerate(x.abs().tolist()) if m >= np.float32(threshold)]
    kept, values = kernels.filter_at_least(indices, x, threshold)
    assert kept.dtype == dtype
    assert kept.tolist() == [3 * i for i in expected]
    assert bits(values) == bits(x[torch.tensor(expected, dtype=torch.int64)])


@given(st.one_of(normals, st.builds(spread, sizes, seeds)), st.sampled_from([1e-30, 1e-12, 1.0, 1e15, 1e30]))
def test_magnitude_moments(x: Tensor, scale: float) -> None:
    """Mean and standard deviation of |x|, both zero for nothing at all; no square overflows or underflows."""
    x = x * scale
    magnitude = x.double().abs().numpy()
    mean, deviation = (float(magnitude.mean()), float(magnitude.std())) if magnitude.size else (0.0, 0.0)
    for kernels in (cpu, reference):
        assert kernels.magnitude_moments(x) == pytest.approx((mean, deviation), rel=1e-9, abs=1e-7 * mean)


# --- threads -------------------------------------------------------------------------------------------------


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("size", [2**20, 2**20 + 33])
def test_two_torch_threads_make_no_difference(size: int) -> None:
    """Large inputs are cut into slices; what comes out does not show it, wherever the capacity ends."""
    x, grad = spread(size, 1), spread(size, 2)
    asked = [(1.0, 0), (1.0, 1000), (1.0, size // 4), (100.0, size), (0.0, 600_000), (INF, 9)]
    absorbed, left = x.clone(), grad.clone()
    with torch_threads(2):
        found = [cpu.select(x, threshold, capacity) for threshold, capacity in asked]
        picked = cpu.accumulate_select(absorbed, left, 50.0, size // 8, keep_old=True)
        kth, moments = cpu.kth_magnitude(x, size // 100), cpu.magnitude_moments(x)
        scaled = x.clone()
        largest = cpu.scale_(scaled, 1 / 3)
    for one, (threshold, capacity) in zip(found, asked, strict=True):
        assert_same_picked(one, reference.select(x, threshold, capacity))
    assert torch.equal(absorbed, x + grad)
    assert torch.equal(left, x)
    assert_same_picked(picked, reference.select(x + grad, 50.0, size // 8))
    assert kth == reference.kth_magnitude(x, size // 100)
    assert largest == scaled.abs().max()
    assert torch.equal(scaled, x * (1 / 3))
    assert moments == pytest.approx(reference.magnitude_moments(x), rel=1e-9)


@pytest.mark.parametrize("place", [0, 2**20 - 1])
def test_one_bad_number_is_seen_in_any_slice(place: int) -> None:
    x = torch.zeros(2**20)
    x[place] = NAN
    with torch_threads(2):
        assert not cpu.select(x, INF, 0).finite
        assert math.isnan(cpu.scale_(x, 1.0))
    assert not reference.select(x, INF, 0).finite


def all_kernels(kernels: Backend, seed: int) -> list[object]:
    """What every kernel says about one input, in comparable form."""
    x, grad, out = spread(4001, seed), spread(4001, seed + 1), normal(4001, seed)
    parts = [sparse_part(4001, seed + j) for j in range(3)]
    picked = kernels.accumulate_select(grad, x, 2.0, 500, True)
    union = kernels.union_sum((part for part in parts), 0, 4001)
    shared = kernels.common(*parts[1], parts[2][0])
    return [
        bits(picked.values), picked.indices.tolist(), picked.count, bits(x), bits(grad),
        kernels.kth_magnitude(x, 40), kernels.first_equal(x, float(x[7].abs()), 2).tolist(),
        kernels.scatter_add_(out, *parts[0]), sums(out), kernels.assign_(out, *parts[1]), bits(out),
        union[0].tolist(), sums(union[1]),
        shared[0].tolist(), bits(shared[1]), kernels.magnitude_histogram(x, 30_000, 99),
        kernels.filter_at_least(*parts[1], 0.5)[0].tolist(), kernels.scale_(x, 1 / 3), bits(x),
    ]  # fmt: skip


def test_many_python_threads_at_once() -> None:
    """Kernels release the GIL and keep no shared state."""
    expected = [all_kernels(reference, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda seed: all_kernels(cpu, seed), range(8))) == expected


@pytest.mark.parametrize("share", [1e-5, 0.01, 0.6, 1.0])
@pytest.mark.parametrize("kind", ["normal", "equal", "few values", "zeros"])
def test_the_kth_magnitude_of_many_entries_needs_no_copy(kind: str, share: float) -> None:
    """Also where a sample says nothing: two passes over the bits find what sorting finds."""
    thresholds = pytest.importorskip("oktopk.kernels.cpu.thresholds")
    n, generator = 2 * thresholds.SAMPLE + 5, torch.Generator().manual_seed(1)
    x = {
        "normal": torch.randn(n, generator=generator),
        "equal": torch.full((n,), -1e-3),
        "few values": torch.randint(-3, 4, (n,), generator=generator).float(),
        "zeros": torch.zeros(n),
    }[kind]
    k = max(1, int(share * n))
    expected = float(x.abs().sort(descending=True).values[k - 1])
    assert thresholds._kth_by_bits(x, k) == thresholds.kth_magnitude(x, k) == expected
