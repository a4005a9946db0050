"""The kernels in torch, for any device: the definition of what every other backend computes.

On CPUs the large loops run in blocks that fit the cache, which makes this fast enough without Numba.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from .pieces import put_in_turn, select_in_turn
from .types import BIN_BITS, OUTSIDE, Picked, float32, index_dtype, threshold_pair

_BLOCK = 1 << 18


def _blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    step = _BLOCK if x.device.type == "cpu" else max(1, x.numel())
    for start in range(0, max(1, x.numel()), step):
        yield start, min(start + step, x.numel())


def accumulate_select(
    residual: Tensor, grad: Tensor, threshold: float, capacity: int, keep_old: bool = False
) -> Picked:
    """Compute residual += grad, then select from it. With keep_old, grad receives the old residual."""
    for start, stop in _blocks(residual):
        old, new = residual[start:stop], grad[start:stop]
        accumulated = old + new
        if keep_old:
            new.copy_(old)
        old.copy_(accumulated)
    return select(residual, threshold, capacity)


def select(x: Tensor, threshold: float, capacity: int) -> Picked:
    """Select the first `capacity` entries with |x| >= threshold, in index order."""
    low, higher = map(float, threshold_pair(threshold))
    indices = torch.cat([_nonzero(~(x[start:stop].abs() < low)) + start for start, stop in _blocks(x)])
    values = x[indices]  # non-finite entries are always selected
    above, finite = int((values.abs() >= higher).sum()), bool(values.isfinite().all())
    count, kept = indices.numel(), indices[:capacity]
    return Picked(kept.to(index_dtype(x.numel())), values[:capacity], count, above, finite)


def _nonzero(mask: Tensor) -> Tensor:
    if mask.is_cpu:  # several times as fast as torch
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask).flatten()


def to_host(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A sparse vector in host memory."""
    return indices.cpu(), values.cpu()


def first_equal(x: Tensor, magnitude: float, limit: int) -> Tensor:
    """Indices of the first `limit` entries whose magnitude is exactly `magnitude`."""
    found: list[Tensor] = []
    for start, stop in _blocks(x):
        hits = _nonzero(x[start:stop].abs() == magnitude)[:limit] + start
        limit -= hits.numel()
        found.append(hits)
        if limit <= 0:
            break
    return torch.cat(found).to(index_dtype(x.numel()))


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude, exactly."""
    return float(x.abs().kthvalue(x.numel() - k + 1).values)


def magnitude_histogram(x: Tensor, first: int, bins: int) -> list[int]:
    """Count the magnitudes in each of the bins first, first + 1, …; the last bin also has all larger ones."""
    at = (x.abs().view(torch.int32) >> BIN_BITS).long() - first
    return torch.bincount(at[at >= 0].clamp_(max=bins - 1), minlength=bins).tolist()


def filter_at_least(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The entries of a sparse vector with |value| >= threshold."""
    chosen = values.abs() >= float(float32(threshold))
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
    """Compute x *= factor. Returns the largest magnitude of the result, or NaN if there is one."""
    x.mul_(factor)
    return float(torch.linalg.vector_norm(x, torch.inf)) if x.numel() else 0.0


def _check_inside(index: Tensor, size: int, *counts: Tensor) -> list[int]:
    """Check that the index lies in [0, size): torch takes negative ones for places from the end.

    Returns counts, read from the device in the same transfer.
    """
    if not index.numel():
        return [int(count) for count in counts]
    numbers: list[int] = torch.stack([*index.aminmax(), *counts]).tolist()
    if numbers[0] < 0 or numbers[1] >= size:
        raise ValueError(OUTSIDE)
    return numbers[2:]


def scatter_add_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    """Compute out[indices] += values for unique indices. Returns the growth of the number of non-zeros."""
    index = indices.to(out.device).long()
    _check_inside(index, out.numel())
    before = out[index]
    after = before + values.to(out.device)
    out[index] = after
    return int((after != 0).sum() - (before != 0).sum())


def assign_(out: Tensor, indices: Tensor, values: Tensor) -> int:
    """Overwrite out with the sparse vector. Returns the number of non-zeros."""
    index = indices.to(out.device).long()
    (found,) = _check_inside(index, out.numel(), torch.count_nonzero(values).to(out.device))
    out.zero_()
    out[index] = values.to(out.device)
    return found


def union_sum(parts: Iterable[tuple[Tensor, Tensor]], base: int, span: int) -> tuple[Tensor, Tensor]:
    """Add sparse parts, at least one, whose indices lie in [base, base + span), in the given order.

    Returns the union of the indices, increasing, and the sums.
    """
    rest = iter(parts)
    first = next(rest)
    region = torch.zeros(span, dtype=torch.float32, device=first[1].device)
    touched = torch.zeros(span, dtype=torch.bool, device=region.device)
    for indices, values in chain([first], rest):
        index = indices.long() - base
        _check_inside(index, span)
        region[index] += values
        touched[index] = True
    union = _nonzero(touched)
    return (union + base).to(first[0].dtype), region[union]


def common(indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a sparse vector whose index is also in `others`. Both have increasing indices."""
    if others.numel() == 0:
        return indices[:0], values[:0]
    position = torch.searchsorted(others, indices).clamp_(max=others.numel() - 1)
    chosen = others[position] == indices
    return indices[chosen], values[chosen]


accumulate_select_pieces = partial(select_in_turn, accumulate_select)
scatter_add_pieces_ = partial(put_in_turn, scatter_add_)
assign_pieces_ = partial(put_in_turn, assign_)
