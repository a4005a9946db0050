"""Sparse vectors obey dense arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk.wire.sparse_vector import SparseVector, all_finite, sum_in_region

SIZES = [0, 1, 31, 32, 33, 97]
sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 200))


def sparse(entries: dict[int, float], size: int) -> SparseVector:
    indices = torch.tensor(sorted(entries), dtype=torch.int32)
    return SparseVector(indices, torch.tensor([entries[i] for i in sorted(entries)], dtype=torch.float32), size)


@st.composite
def vectors(draw: st.DrawFn, size: int | None = None, start: int = 0, stop: int | None = None) -> SparseVector:
    """Small whole values, so that there are many ties and every sum is exact; zeros may be entries too."""
    size = draw(sizes) if size is None else size
    stop = size if stop is None else stop
    places = st.integers(start, stop - 1) if stop > start else st.nothing()
    return sparse(draw(st.dictionaries(places, st.integers(-4, 4).map(float))), size)


def edges_of(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), max_size=8).map(lambda inner: [0, *sorted(inner), size])


def same(a: SparseVector, b: SparseVector) -> bool:
    return a.size == b.size and torch.equal(a.indices, b.indices) and torch.equal(a.values, b.values)


def increasing(indices: Tensor) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


@given(vectors())
def test_dense_has_the_values_at_the_indices_and_zeros_elsewhere(x: SparseVector) -> None:
    entries = dict(zip(x.indices.tolist(), x.values.tolist(), strict=True))
    assert x.dense().tolist() == [entries.get(i, 0.0) for i in range(x.size)]


@pytest.mark.parametrize(("size", "dtype"), [(0, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_empty_has_nothing_but_a_size(size: int, dtype: torch.dtype) -> None:
    empty = SparseVector.empty(size)
    assert (len(empty), empty.size, empty.indices.dtype, empty.values.dtype) == (0, size, dtype, torch.float32)


@given(st.data(), vectors())
def test_split_cuts_at_the_edges_and_join_mends_it(data: st.DataObject, x: SparseVector) -> None:
    edges = data.draw(edges_of(x.size))
    parts = x.split(edges)
    assert len(parts) == len(edges) - 1
    for part, (start, stop) in zip(parts, pairwise(edges), strict=True):
        cut = torch.zeros(x.size)
        cut[start:stop] = x.dense()[start:stop]
        assert torch.equal(part.dense(), cut)
        assert all(start <= i < stop for i in part.indices.tolist())
    assert same(SparseVector.join(parts), x)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40])
def test_split_at_edges_that_hardly_fit(size: int) -> None:
    dtype = torch.int32 if size < 2**31 else torch.int64
    x = SparseVector(torch.tensor([0, 5, size - 2, size - 1], dtype=dtype), torch.arange(4.0), size)
    parts = x.split([0, 5, size - 1, size])
    assert [part.values.tolist() for part in parts] == [[0.0], [1.0, 2.0], [3.0]]


@given(st.data(), sizes)
def test_common_is_what_the_other_has_too(data: st.DataObject, size: int) -> None:
    x, y = data.draw(vectors(size)), data.draw(vectors(size))
    mask = torch.zeros(size)
    mask[y.indices.long()] = 1
    shared = x.common(y)
    assert torch.equal(shared.dense(), x.dense() * mask)
    assert set(shared.indices.tolist()) == set(x.indices.tolist()) & set(y.indices.tolist())
    assert increasing(shared.indices)


@given(vectors(), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, float("inf")]))
def test_at_least_keeps_the_large(x: SparseVector, threshold: float) -> None:
    kept = x.at_least(threshold)
    assert same(kept, x[x.values.abs() >= threshold])


@given(st.data(), vectors())
def test_largest_and_the_rest_make_the_whole(data: st.DataObject, x: SparseVector) -> None:
    """The k largest magnitudes, equals by lowest index; both halves in order."""
    k = data.draw(st.integers(1, len(x) + 2))
    top, rest = x.largest(k)
    entries = list(zip(x.indices.tolist(), x.values.tolist(), strict=True))
    expected = sorted(sorted(entries, key=lambda entry: (-abs(entry[1]), entry[0]))[:k])
    assert list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) == expected
    assert sorted(top.indices.tolist() + rest.indices.tolist()) == x.indices.tolist()
    assert increasing(rest.indices)
    assert torch.equal(top.dense() + rest.dense(), x.dense())


@given(st.data(), sizes)
def test_sum_in_region_is_the_dense_sum(data: st.DataObject, size: int) -> None:
    """Over the union of the indices, of parts that lie ready or come one by one."""
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    parts = data.draw(st.lists(vectors(size, start, stop), min_size=1, max_size=4))
    for given_parts in (parts, (part for part in parts)):
        total = sum_in_region(given_parts, start, stop, size)
        assert torch.equal(total.dense(), torch.stack([part.dense() for part in parts]).sum(0))
        assert total.indices.tolist() == sorted({i for part in parts for i in part.indices.tolist()})
        assert (total.size, total.indices.dtype) == (size, torch.int32)


def test_sum_in_region_adds_in_the_order_given() -> None:
    """Float addition is not associative: the order is part of the result."""
    parts = [sparse({0: value}, 1) for value in (1e8, 1.0, -1e8)]
    assert sum_in_region(parts, 0, 1, 1).values.tolist() == [0.0]
    assert sum_in_region([parts[0], parts[2], parts[1]], 0, 1, 1).values.tolist() == [1.0]


@given(st.data(), vectors())
def test_entries_are_taken_by_slice_mask_or_position(data: st.DataObject, x: SparseVector) -> None:
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))), dtype=torch.bool)
    assert same(x[mask], x[mask.nonzero().flatten()])
    middle = data.draw(st.integers(0, len(x)))
    assert same(SparseVector.join([x[:middle], x[middle:]]), x)
    assert torch.equal(x.with_values(-x.values).dense(), -x.dense())


LARGEST = torch.finfo(torch.float32).max
NUMBERS: dict[str, tuple[list[float], bool]] = {
    "none": ([], True),
    "ordinary ones": ([1.0, -2.5, 0.0], True),
    "a sum that overflows": ([LARGEST, LARGEST, 1.0], True),
    "NaN": ([1.0, math.nan, LARGEST], False),
    "infinity": ([0.0, math.inf], False),
    "infinities that cancel": ([math.inf, -math.inf], False),
    "minus infinity": ([-math.inf, 3.0], False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", NUMBERS)
def test_all_finite_looks_at_every_number(case: str, dtype: torch.dtype) -> None:
    numbers, finite = NUMBERS[case]
    largest = torch.finfo(dtype).max
    x = torch.tensor([min(max(n, -largest), largest) if math.isfinite(n) else n for n in numbers], dtype=dtype)
    for padding in (0, 1, 1000):
        padded = torch.cat([torch.zeros(padding, dtype=dtype), x, torch.zeros(padding // 2, dtype=dtype)])
        assert all_finite(padded) is finite
