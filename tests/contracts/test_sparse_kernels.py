"""The compiled kernels equal the reference to the bit: arithmetic on sparse vectors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from oktopk.kernels import Backend, cpu, reference
from tests.support.kernels.backends import every_kernels, fast_kernels
from tests.support.kernels.inputs import (
    SPECIAL,
    Part,
    bits,
    seeds,
    sizes,
    sparse_part,
    special_vector,
    sums,
)

# --- sparse arithmetic ---------------------------------------------------------------------------------------

index_dtypes = st.sampled_from([torch.int32, torch.int64])


@fast_kernels
@given(sizes, seeds, index_dtypes)
def test_scatter_add_is_the_reference(fast: Backend, size: int, seed: int, dtype: torch.dtype) -> None:
    """Same sums; the count returned is by how much the non-zeros grew."""
    indices, values = sparse_part(size, seed, dtype=dtype)
    start = special_vector(SPECIAL * 100)[torch.from_numpy(np.random.default_rng(seed).permutation(size))]
    outcomes = []
    for kernels in (fast, reference):
        out = start.clone()
        grown = kernels.scatter_add_(out, indices, values)
        assert grown == int(out.count_nonzero() - start.count_nonzero())
        outcomes.append(sums(out))
    assert outcomes[0] == outcomes[1]


@given(sizes, seeds, index_dtypes, st.integers(0, 40))
def test_assign_makes_it_the_sparse_vector_wherever_it_lies(
    size: int, seed: int, dtype: torch.dtype, at: int
) -> None:
    """Zero elsewhere, the non-zeros counted, and nothing beside it touched, from any address on."""
    indices, values = sparse_part(size, seed, dtype=dtype)
    for kernels in (cpu, reference):
        memory = torch.full((at + size + 40,), 7.0)
        out = memory[at : at + size]
        found = kernels.assign_(out, indices, values)
        assert found == int(out.count_nonzero())
        expected = torch.zeros(size)
        expected[indices.long()] = values
        assert bits(out) == bits(expected)
        assert (memory[:at] == 7).all()
        assert (memory[at + size :] == 7).all()


@fast_kernels
@given(st.integers(0, 200), st.lists(seeds, min_size=1, max_size=5), st.sampled_from([0, 7, 10**6]), index_dtypes)
@example(64, [1, 1], 0, torch.int32)
@example(65, [2, 3, 4], 10**6, torch.int64)
def test_union_sum_is_the_reference(
    fast: Backend, span: int, part_seeds: list[int], base: int, dtype: torch.dtype
) -> None:
    """Same union and same sums, whether the parts lie ready or come one by one."""
    parts = [sparse_part(span, seed, base, dtype) for seed in part_seeds]
    expected = reference.union_sum(parts, base, span)
    for given_parts in (parts, (part for part in parts)):
        indices, values = fast.union_sum(given_parts, base, span)
        assert indices.dtype == expected[0].dtype == dtype
        assert torch.equal(indices, expected[0])
        assert sums(values) == sums(expected[1])


@every_kernels
@given(st.integers(1, 200), st.lists(seeds, min_size=1, max_size=5))
def test_union_sum_adds_in_order(kernels: Backend, span: int, part_seeds: list[int]) -> None:
    """Float addition in the order of the parts; an index is in the union even if its sum is zero."""
    dense, touched = torch.zeros(span), torch.zeros(span, dtype=torch.bool)
    parts = [sparse_part(span, seed) for seed in part_seeds]
    for indices, values in parts:
        dense[indices.long()] += values
        touched[indices.long()] = True
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


def test_parts_may_have_strides() -> None:
    first = torch.arange(3, dtype=torch.int32), torch.ones(3)
    second = torch.arange(6, dtype=torch.int32)[::2], torch.arange(6.0)[::2]
    indices, values = cpu.union_sum([first, second], 0, 10)
    assert (indices.tolist(), values.tolist()) == ([0, 1, 2, 4], [1.0, 1.0, 3.0, 4.0])


@pytest.mark.parametrize("wrong", ["type of indices", "type of values", "size"])
def test_compiled_code_sums_no_part_that_it_cannot_read(wrong: str) -> None:
    """It gets addresses only."""
    first = torch.arange(3, dtype=torch.int32), torch.ones(3)
    second = {
        "type of indices": (torch.arange(3), torch.ones(3)),
        "type of values": (torch.arange(3, dtype=torch.int32), torch.ones(3, dtype=torch.float64)),
        "size": (torch.arange(3, dtype=torch.int32), torch.ones(2)),
    }[wrong]
    with pytest.raises(ValueError, match="cannot sum parts"):
        cpu.union_sum([first, second], 0, 10)


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
    named = {index: float(place) for place, index in enumerate(sorted(a))}
    for kernels in (cpu, reference):
        indices, values = kernels.common(first, torch.arange(len(a), dtype=torch.float32), second)
        assert (indices.dtype, values.dtype) == (dtype, torch.float32)
        assert indices.tolist() == sorted(a & b)
        assert values.tolist() == [named[index] for index in sorted(a & b)]
