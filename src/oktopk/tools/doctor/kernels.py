"""Check the compiled kernels against the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oktopk.kernels import Backend, Picked, backend, reference

SIZE, K = 10_007, 100


def check_kernels() -> dict[str, Any]:
    """Report which kernels are in use, and which of them differ from the reference on a small input."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    used = backend(x)
    return {"compiled": used is not reference, "differ": find_differences(used, x)}


def find_differences(used: Backend, x: Tensor) -> list[str]:
    ours, wanted = _run_kernels(used, x), _run_kernels(reference, x)
    return [name for name in wanted if not _same(ours[name], wanted[name])]


def _run_kernels(used: Backend, x: Tensor) -> dict[str, list[Any]]:
    threshold = used.kth_magnitude(x, K)
    residual, gradient = x.clone(), 0.5 * x.flip(0)
    picked = used.select(x, threshold, K)
    region = torch.zeros_like(x)
    grown = used.scatter_add_(region, picked.indices, picked.values)
    half = picked.indices[::2].clone()
    return {
        "kth_magnitude": [threshold],
        "select": _parts(picked),
        "accumulate_select": [
            *_parts(used.accumulate_select(residual, gradient, threshold, 2 * SIZE, True)),
            *(residual, gradient),
        ],
        "magnitude_histogram": [used.magnitude_histogram(x, 0, 512)],
        "scatter_add_": [grown, region],
        "assign_": [used.assign_(filled := x.clone(), picked.indices, picked.values), filled],
        "union_sum": list(used.union_sum([(picked.indices, picked.values), (half, region[half.long()])], 0, SIZE)),
        "common": list(used.common(picked.indices, picked.values, half)),
    }


def _parts(picked: Picked) -> list[Any]:
    return [picked.indices, picked.values, picked.count, picked.finite]


def _same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)
