"""The compiled kernels are the reference kernels to the bit, for every input and any number of threads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from oktopk.kernels import SLOPE_STEP, SMALLEST, Backend, Picked, bin_edge, bin_of, cpu, reference
from oktopk.kernels.types import SAMPLE, SAMPLE_BLOCK, sample_positions

SIZES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 97, 1009]
BIG = 2 * SAMPLE + 33  # the smallest sizes that are sampled
NAN, INF = math.nan, math.inf
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, SMALLEST, -SMALLEST, SMALLEST / 2, -1e-45, 3e38, -3e38, INF, -INF, NAN]
LARGEST = float(np.finfo(np.float32).max)


# --- inputs and comparisons ----------------------------------------------------------------------------------


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).tolist()


def one_nan(x: Tensor) -> Tensor:
    """As integers. Of two NaNs, the sum may be either, so all NaNs count as one."""
    return torch.where(x.isnan(), NAN, x).view(torch.int32)


def sums(x: Tensor) -> list[int]:
    """Bits of what an addition gave."""
    return one_nan(x).tolist()


def same_float(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def assert_same_picked(a: Picked, b: Picked) -> None:
    assert (a.count, a.above, a.finite, a.complete) == (b.count, b.above, b.finite, b.complete)
    assert a.indices.dtype == b.indices.dtype
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(one_nan(a.values), one_nan(b.values))


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def spread(size: int, seed: int = 0) -> Tensor:
    """Heavy tails: magnitudes over many orders, both signs."""
    return normal(size, seed) * torch.exp(3 * normal(size, seed + 1))


def special_vector(elements: list[float]) -> Tensor:
    return torch.tensor(elements, dtype=torch.float32)


def any_bits(seed_and_size: tuple[int, int]) -> Tensor:
    """Every bit pattern there is, NaNs of all kinds among them."""
    seed, size = seed_and_size
    random_bits = np.random.default_rng(seed).integers(-(2**31), 2**31, size, np.int32)
    return torch.from_numpy(random_bits).view(torch.float32)


sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 200))
seeds = st.integers(0, 2**16)
specials = st.lists(st.sampled_from(SPECIAL), max_size=100).map(special_vector)
normals = st.builds(normal, sizes, seeds)
vectors = st.one_of(specials, normals, st.builds(spread, sizes, seeds))
capacities = st.one_of(st.integers(0, 3), st.integers(0, 120), st.just(10**6))


def thresholds(x: Tensor) -> st.SearchStrategy[float]:
    """The odd ones, and those that some entry meets exactly."""
    fixed = st.sampled_from([0.0, SMALLEST, 0.7, INF])
    magnitudes = [m for m in x.abs().tolist() if not math.isnan(m) and m <= 3e38]
    return st.one_of(fixed, st.sampled_from(magnitudes)) if magnitudes else fixed


# --- selection -----------------------------------------------------------------------------------------------


@given(st.data(), st.one_of(vectors, st.tuples(seeds, sizes).map(any_bits)), capacities)
def test_select_is_the_reference(data: st.DataObject, x: Tensor, capacity: int) -> None:
    """Same indices, values, counts and flag; and the input is only read."""
    threshold = data.draw(thresholds(x))
    before = bits(x)
    fast, slow = cpu.select(x, threshold, capacity), reference.select(x, threshold, capacity)
    assert_same_picked(fast, slow)
    assert bits(fast.values) == bits(slow.values)
    assert bits(x) == before


@given(st.data(), sizes, seeds, capacities, st.booleans())
def test_accumulate_select_is_the_reference(
    data: st.DataObject, size: int, seed: int, capacity: int, keep_old: bool
) -> None:
    """Same selection, same sums, and the same left behind in the gradient."""
    rng = np.random.default_rng(seed)
    pool = torch.cat([special_vector(SPECIAL), normal(20, seed)])
    residual, grad = (pool[torch.from_numpy(rng.integers(0, pool.numel(), size))] for _ in range(2))
    threshold = data.draw(thresholds(residual + grad))
    outcomes = []
    for kernels in (cpu, reference):
        r, g = residual.clone(), grad.clone()
        outcomes.append((kernels.accumulate_select(r, g, threshold, capacity, keep_old), sums(r), bits(g)))
    assert_same_picked(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1:] == outcomes[1][1:]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep_old", [False, True])
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_accumulate_adds_and_keeps_the_old(kernels: Backend, keep_old: bool, size: int) -> None:
    """residual += grad; the gradient stays, or becomes the old residual if that is to be kept."""
    residual, grad = spread(size, 1), spread(size, 2)
    r, g = residual.clone(), grad.clone()
    picked = kernels.accumulate_select(r, g, 1.0, size, keep_old)
    assert bits(r) == bits(residual + grad)
    assert bits(g) == bits(residual if keep_old else grad)
    assert_same_picked(picked, kernels.select(r, 1.0, size))


@given(st.data(), vectors, capacities)
def test_what_picked_means(data: st.DataObject, x: Tensor, capacity: int) -> None:
    """The first entries at the threshold or above; counts of all of them, and of those 5 % above it."""
    threshold = data.draw(thresholds(x))
    finite = bool(x.isfinite().all())
    higher = np.float32(SLOPE_STEP) * np.float32(threshold)
    for kernels in (cpu, reference):
        picked = kernels.select(x, threshold, capacity)
        assert picked.finite == finite
        if not finite:
            continue
        found = np.flatnonzero(np.abs(x.numpy()) >= np.float32(threshold))
        assert picked.count == found.size
        assert picked.indices.tolist() == found[:capacity].tolist()
        assert bits(picked.values) == bits(x[picked.indices.long()])
        assert picked.above == int((np.abs(x.numpy()) >= higher).sum())


@pytest.mark.parametrize("size", [s for s in SIZES if s])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("kernels", [cpu, reference])
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


@pytest.mark.parametrize("threshold", [LARGEST / 1.05, 3.3e38, LARGEST, 2 * LARGEST, 1e300, INF])
def test_thresholds_beyond_the_largest_float(threshold: float) -> None:
    """A threshold, or 1.05 times it, that does not fit a float32 is infinity; nobody warns of it."""
    x = special_vector([1.0, 3.3e38, -LARGEST])
    assert_same_picked(cpu.select(x, threshold, 3), reference.select(x, threshold, 3))
    indices = torch.arange(3, dtype=torch.int32)
    assert cpu.filter_at_least(indices, x, threshold)[0].tolist() == cpu.select(x, threshold, 3).indices.tolist()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_a_large_world_has_64_bit_indices(kernels: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 2^31 entries do not fit this machine: pretend that this one is such a vector."""
    x = spread(1009)
    expected = kernels.select(x, 1.0, 100)
    assert expected.indices.dtype == torch.int32
    monkeypatch.setattr(kernels, "index_dtype", lambda size: torch.int64)
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


@pytest.mark.parametrize("size", [1, 31, 1009, BIG])
@pytest.mark.parametrize("margin", [0.0, 1.5, 8.0, 1e9])
def test_sampled_threshold_is_the_reference(size: int, margin: float) -> None:
    x = spread(size)
    for k in {1, max(1, size // 100), size}:
        assert cpu.sampled_threshold(x, k, margin) == reference.sampled_threshold(x, k, margin)


def test_sampled_threshold_is_a_fair_estimate() -> None:
    """At 1 % density the count above the estimate is within a few per cent of k."""
    x, k = normal(BIG), BIG // 100
    count = int((x.abs() >= cpu.sampled_threshold(x, k)).sum())
    assert 0.9 * k < count < 1.1 * k
    assert cpu.sampled_threshold(x, k, 3.0) < cpu.sampled_threshold(x, k)


@given(
    vectors,
    st.sampled_from([0, 1, 200, 0x3F80 << 1, 0x7F7F << 1, 0x7F80 << 1]),
    st.sampled_from([1, 2, 128, 5000]),
)
def test_magnitude_histogram_counts_by_bins(x: Tensor, first: int, bins: int) -> None:
    """Bin j holds the magnitudes from its edge to the next; the last one all above; those below are left out."""
    edges = np.array([bin_edge(first + j) for j in range(bins)], np.float32)
    magnitude = np.abs(x.numpy())
    for kernels in (cpu, reference):
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


@given(st.data(), vectors, st.sampled_from([torch.int32, torch.int64]))
def test_filter_keeps_what_reaches_the_threshold(data: st.DataObject, x: Tensor, dtype: torch.dtype) -> None:
    """In order, and the input is only read; a NaN reaches nothing."""
    threshold = data.draw(thresholds(x))
    indices = torch.arange(x.numel(), dtype=dtype) * 3
    expected = [i for i, m in enumerate(x.abs().tolist()) if m >= np.float32(threshold)]
    for kernels in (cpu, reference):
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


# --- sparse arithmetic ---------------------------------------------------------------------------------------

Part = tuple[Tensor, Tensor]


def sparse_part(size: int, seed: int, base: int = 0, dtype: torch.dtype = torch.int32) -> Part:
    """Some of the indices of [base, base + size), each with a number that may be odd."""
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(size) < rng.random()) + base
    pool = torch.cat([special_vector(SPECIAL), normal(10, seed)])
    return torch.from_numpy(indices).to(dtype), pool[torch.from_numpy(rng.integers(0, pool.numel(), indices.size))]


index_dtypes = st.sampled_from([torch.int32, torch.int64])


@given(sizes, seeds, index_dtypes)
def test_scatter_add_is_the_reference(size: int, seed: int, dtype: torch.dtype) -> None:
    """Same sums; the count returned is by how much the non-zeros grew."""
    indices, values = sparse_part(size, seed, dtype=dtype)
    start = special_vector(SPECIAL * 100)[torch.from_numpy(np.random.default_rng(seed).permutation(size))]
    outcomes = []
    for kernels in (cpu, reference):
        out = start.clone()
        grown = kernels.scatter_add_(out, indices, values)
        assert grown == int(out.count_nonzero() - start.count_nonzero())
        outcomes.append(sums(out))
    assert outcomes[0] == outcomes[1]


@given(st.integers(0, 200), st.lists(seeds, min_size=1, max_size=5), st.sampled_from([0, 7, 10**6]), index_dtypes)
@example(64, [1, 1], 0, torch.int32)
@example(65, [2, 3, 4], 10**6, torch.int64)
def test_union_sum_is_the_reference(span: int, part_seeds: list[int], base: int, dtype: torch.dtype) -> None:
    """Same union and same sums, whether the parts lie ready or come one by one."""
    parts = [sparse_part(span, seed, base, dtype) for seed in part_seeds]
    expected = reference.union_sum(parts, base, span)
    for given_parts in (parts, (part for part in parts)):
        indices, values = cpu.union_sum(given_parts, base, span)
        assert indices.dtype == expected[0].dtype == dtype
        assert torch.equal(indices, expected[0])
        assert sums(values) == sums(expected[1])


@given(st.integers(1, 200), st.lists(seeds, min_size=1, max_size=5))
def test_union_sum_adds_in_order(span: int, part_seeds: list[int]) -> None:
    """Float addition in the order of the parts; an index is in the union even if its sum is zero."""
    dense, touched = torch.zeros(span), torch.zeros(span, dtype=torch.bool)
    parts = [sparse_part(span, seed) for seed in part_seeds]
    for indices, values in parts:
        dense[indices.long()] += values
        touched[indices.long()] = True
    for kernels in (cpu, reference):
        indices, values = kernels.union_sum(parts, 0, span)
        assert indices.tolist() == touched.nonzero().flatten().tolist()
        assert sums(values) == sums(dense[touched])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_union_sum_leaves_nothing_behind(error: type[BaseException]) -> None:
    """The scratch is shared by all calls of a thread: half a sum must not leak into the next."""

    def interrupted() -> Iterator[Part]:
        yield torch.arange(100, dtype=torch.int32), torch.ones(100)
        raise error("on purpose")

    with pytest.raises(error):
        cpu.union_sum(interrupted(), 0, 100)
    indices, values = cpu.union_sum([(torch.tensor([3], dtype=torch.int32), torch.ones(1))], 0, 100)
    assert (indices.tolist(), values.tolist()) == ([3], [1.0])


def test_regions_of_changing_size_share_one_scratch() -> None:
    """Large to small and back, and none at all."""
    for span in (1000, 1, 64, 63, 1000, 5000, 0, 4999):
        parts = [sparse_part(span, seed) for seed in range(3)]
        found, expected = cpu.union_sum(parts, 0, span), reference.union_sum(parts, 0, span)
        assert torch.equal(found[0], expected[0])
        assert sums(found[1]) == sums(expected[1])


index_sets = st.one_of(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 2**31 - 1), max_size=40))


@given(index_sets, index_sets, index_dtypes)
def test_common_is_the_intersection(a: set[int], b: set[int], dtype: torch.dtype) -> None:
    first, second = (torch.tensor(sorted(s), dtype=dtype) for s in (a, b))
    for kernels in (cpu, reference):
        positions = kernels.common(first, second)
        assert positions.dtype == torch.int64
        assert first[positions].tolist() == sorted(a & b)


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
    for one, (threshold, capacity) in zip(found, asked, strict=True):
        assert_same_picked(one, reference.select(x, threshold, capacity))
    assert torch.equal(absorbed, x + grad)
    assert torch.equal(left, x)
    assert_same_picked(picked, reference.select(x + grad, 50.0, size // 8))
    assert kth == reference.kth_magnitude(x, size // 100)
    assert moments == pytest.approx(reference.magnitude_moments(x), rel=1e-9)


@pytest.mark.parametrize("place", [0, 2**20 - 1])
def test_one_bad_number_is_seen_in_any_slice(place: int) -> None:
    x = torch.zeros(2**20)
    x[place] = NAN
    with torch_threads(2):
        assert not cpu.select(x, INF, 0).finite
    assert not reference.select(x, INF, 0).finite


def all_kernels(kernels: Backend, seed: int) -> list[object]:
    """What every kernel says about one input, in comparable form."""
    x, grad, out = spread(4001, seed), spread(4001, seed + 1), normal(4001, seed)
    parts = [sparse_part(4001, seed + j) for j in range(3)]
    picked = kernels.accumulate_select(grad, x, 2.0, 500, True)
    union = kernels.union_sum((part for part in parts), 0, 4001)
    return [
        bits(picked.values), picked.indices.tolist(), picked.count, bits(x), bits(grad),
        kernels.kth_magnitude(x, 40), kernels.first_equal(x, float(x[7].abs()), 2).tolist(),
        kernels.scatter_add_(out, *parts[0]), sums(out), union[0].tolist(), sums(union[1]),
        kernels.common(parts[1][0], parts[2][0]).tolist(), kernels.magnitude_histogram(x, 30_000, 99),
        kernels.filter_at_least(*parts[1], 0.5)[0].tolist(),
    ]  # fmt: skip


def test_many_python_threads_at_once() -> None:
    """Kernels release the GIL and keep no shared state."""
    expected = [all_kernels(reference, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda seed: all_kernels(cpu, seed), range(8))) == expected


# --- without Numba -------------------------------------------------------------------------------------------

NO_NUMBA = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
"""

COLLECTIVE = """
import hashlib
import torch
import oktopk

def digest(algorithm, values):
    def run(comm):
        random = torch.Generator().manual_seed(comm.rank)
        residual, state, digest = torch.zeros(3001), None, hashlib.sha256()
        for step in range(4):
            tensor = torch.randn(3001, generator=random) * torch.randn(3001, generator=random).exp()
            mean, info = oktopk.sparse_allreduce(
                tensor, 0.05, algorithm, residual, comm, values=values, state=state, step=step
            )
            state = info.state
            digest.update(mean.numpy().tobytes() + residual.numpy().tobytes())
        return digest.hexdigest()
    return oktopk.run_threads(3, run)

digests = [[name, values, *digest(name, values)] for name in oktopk.ALGORITHMS for values in ("fp32", "fp16")]
"""

TELL = """
import json
assert "numba" not in sys.modules
print(json.dumps(digests))
"""


def test_the_library_is_the_same_without_numba() -> None:
    """Every algorithm, four steps with residuals on three ranks: the same bits, only slower."""
    command = [sys.executable, "-W", "error", "-c", NO_NUMBA + COLLECTIVE + TELL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    with_numba: dict[str, list[list[str]]] = {}
    exec(COLLECTIVE, with_numba)
    assert len(with_numba["digests"]) >= 12
    assert json.loads(done.stdout) == with_numba["digests"]
