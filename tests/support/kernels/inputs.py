"""What the kernel tests feed to the kernels, and how they compare what comes out."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from oktopk.kernels import SMALLEST, Picked
from oktopk.kernels.cpu.thresholds import SAMPLE

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


Part = tuple[Tensor, Tensor]


def sparse_part(size: int, seed: int, base: int = 0, dtype: torch.dtype = torch.int32) -> Part:
    """Some of the indices of [base, base + size), each with a number that may be odd."""
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(size) < rng.random()) + base
    pool = torch.cat([special_vector(SPECIAL), normal(10, seed)])
    return torch.from_numpy(indices).to(dtype), pool[torch.from_numpy(rng.integers(0, pool.numel(), indices.size))]
