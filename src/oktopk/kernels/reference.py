"""The kernels in plain torch: the definition of what every other backend computes, on any device.

On CPUs the big loops go in blocks that fit the cache, which is what makes this usable without Numba.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .pieces import put_in_turn, select_in_turn
from .types import BIN_BITS, SAMPLE, SAMPLE_BLOCK, SLOPE_STEP, Picked, index_dtype, sample_positions, sample_rank

_BLOCK = 1 << 18


def _blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    step = _BLOCK if x.device.type == "cpu" else max(1, x.numel())
    for start in range(0, x.numel(), step):
        yield start, min(start + step, x.numel())


def _float32(threshold: float) -> float:
    return torch.tensor(threshold, dtype=torch.float32).item()


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int, keep_old: bool = False
) -> Picked:
    """residual += grad, then `select` on it. With keep_old, grad is left holding the old residual."""
    for start, stop in _blocks(residual):
        old, new = residual[start:stop], grad[start:stop]
        accumulated = old + new
        if keep_old:
            new.copy_(old)
        old.copy_(accumulated)
    return select(residual, threshold, capacity)


def select(x: Tensor, threshold: float, capacity: int) -> Picked:
    """The entries with |x| >= threshold in index order, at most the first `capacity` of them."""
    threshold = _float32(threshold)
    higher = _float32(_float32(SLOPE_STEP) * threshold)
    found = [_nonzero(~(x[start:stop].abs() < threshold)) + start for start, stop in _blocks(x)]
    indices = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=x.device)
    values = x[indices]  # whatever is not finite is among them
    above, finite = int((values.abs() >= higher).sum()), bool(values.isfinite().all())
    count, kept = indices.numel(), indices[:capacity]
    return Picked(kept.to(index_dtype(x.numel())), values[:capacity], count, above, finite)


def _nonzero(mask: Tensor) -> Tensor:
    if mask.is_cpu:  # several times faster than torch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask).flatten()


def first_equal(x: Tensor, magnitude: float, limit: int) -> Tensor:
    """Indices of the first `limit` entries whose magnitude is exactly `magnitude`."""
    found: list[Tensor] = []
    for start, stop in _blocks(x):
        if limit <= 0:
            break
        hits = _nonzero(x[start:stop].abs() == magnitude)[:limit] + start
        limit -= hits.numel()
        found.append(hits)
    indices = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=x.device)
    return indices.to(index_dtype(x.numel()))


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude, exactly."""
    return float(x.abs().kthvalue(x.numel() - k + 1).values)


def sampled_threshold(x: Tensor, k: int, margin: float = 0.0) -> float:
    """An estimate of the k-th largest magnitude, `margin` deviations on the low side."""
    n = x.numel()
    if n <= 2 * SAMPLE:
        return kth_magnitude(x, min(n, sample_rank(k, n, n, margin)))
    starts = torch.from_numpy(sample_positions(n)).to(x.device)
    sample = x[(starts[:, None] + torch.arange(SAMPLE_BLOCK, device=x.device)).flatten()]
    return kth_magnitude(sample, sample_rank(k, n, sample.numel(), margin))


def magnitude_histogram(x: Tensor, first: int, bins: int) -> list[int]:
    """How many magnitudes fall into each of the bins first, first + 1, …; the last one has all larger ones too."""
    at = (x.abs().view(torch.int32) >> BIN_BITS).long() - first
    return torch.bincount(at[at >= 0].clamp_(max=bins - 1), minlength=bins).tolist()


def filter_at_least(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The entries of a sparse vector with |value| >= threshold."""
    chosen = values.abs() >= _float32(threshold)
    return indices[chosen], values[chosen]


def magnitude_moments(x: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of |x|."""
    if x.numel() == 0:
        return 0.0, 0.0
    total, squares = 0.0, 0.0
    for start, stop in _blocks(x):
        magnitude = x[start:stop].abs().double()
        total += float(magnitude.sum())
        squares += float(magnitude.square().sum())
    mean = total / x.numel()
    return mean, max(0.0, squares / x.numel() - mean * mean) ** 0.5


def scale_(x: Tensor, factor: float) -> float:
    """x *= factor. Returns the largest magnitude of the outcome, a NaN if there is one."""
    x.mul_(factor)
    return float(torch.linalg.vector_norm(x, torch.inf)) if x.numel() else 0.0


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    """out[indices] += values (indices are unique). Returns by how much the number of non-zeros grew."""
    index = indices.long()
    before = out[index]
    after = before + values
    out[index] = after
    return int((after != 0).sum() - (before != 0).sum())


def assign_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    """out becomes the sparse vector, zero elsewhere. Returns the number of non-zeros."""
    out.zero_()
    out[indices.long()] = values
    return int(torch.count_nonzero(values))


def union_sum(parts: Iterable[tuple[Tensor, Tensor]], base: int, span: int) -> tuple[Tensor, Tensor]:
    """Sum sparse parts whose indices lie in [base, base + span), in the order they come.

    Returns the union of the indices, increasing, and the sums. There is at least one part.
    """
    region = touched = dtype = None
    for indices, values in parts:
        if region is None or touched is None:
            region = torch.zeros(span, dtype=torch.float32, device=values.device)
            touched = torch.zeros(span, dtype=torch.bool, device=values.device)
            dtype = indices.dtype
        index = indices.long() - base
        region[index] += values
        touched[index] = True
    if region is None or touched is None:
        raise ValueError("union_sum needs at least one part")
    union = _nonzero(touched)
    return (union + base).to(dtype), region[union]


def common(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a sparse vector whose index is also among the others; both increase strictly."""
    if others.numel() == 0:
        return indices[:0], values[:0]
    position = torch.searchsorted(others, indices).clamp_(max=others.numel() - 1)
    chosen = others[position] == indices
    return indices[chosen], values[chosen]


accumulate_select_pieces = partial(select_in_turn, accumulate_select)
scatter_add_pieces_ = partial(put_in_turn, scatter_add_)
assign_pieces_ = partial(put_in_turn, assign_)
