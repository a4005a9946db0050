"""Time the kernels against the memory limit, plain torch operations and torch.topk.

The memory limit is torch's in-place `a += b` of the same size, measured in the same run. All contenders are timed
in turn, so that a disturbance affects all of them.
"""

from __future__ import annotations

import numpy as np
import torch
from common import arguments, report, side_by_side

from oktopk.kernels import backend, reference
from oktopk.kernels.cpu.thresholds import sampled_threshold

HEADERS = ["n", "density", "threads", "kernel", "ms", "memory limit / it", "it / fused"]


def plain_torch(residual: torch.Tensor, grad: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch operations, without a kernel."""
    residual += grad
    indices = torch.nonzero(residual.abs() >= threshold).flatten()
    return indices, residual[indices]


def topk(residual: torch.Tensor, grad: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    residual += grad
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    return indices, residual[indices]


def measure(size: int, density: float, threads: int, repeats: int) -> tuple[list[list[object]], list[dict]]:
    torch.set_num_threads(threads)
    source = torch.randn(size) * torch.randn(size).exp()
    grad, residual = source.clone(), torch.zeros(size)
    k = int(size * density)
    kernels = backend(source)
    threshold = kernels.kth_magnitude(source, k)
    capacity = int(1.25 * k)

    def reset() -> None:
        # By NumPy: after an operation of several threads, torch's OpenMP threads spin for a while on the cores
        # that the contender is to run on.
        np.copyto(grad.numpy(), source.numpy())
        residual.numpy().fill(0)

    small = torch.zeros(size)
    picked = kernels.select(source, threshold, capacity)
    runs = {
        "a += b": lambda: residual.add_(grad),
        "accumulate + select": lambda: kernels.accumulate_select(residual, grad, threshold, capacity),
        "the same, old residual kept": lambda: kernels.accumulate_select(
            residual, grad, threshold, capacity, keep_old=True
        ),
        "select": lambda: kernels.select(grad, threshold, capacity),
        "exact k-th magnitude": lambda: kernels.kth_magnitude(grad, k),
        "sampled threshold": lambda: sampled_threshold(grad, k),
        "scatter": lambda: kernels.scatter_add_(small, picked.indices, picked.values),
        "torch operations": lambda: plain_torch(residual, grad, threshold),
        "reference (torch, in blocks)": lambda: reference.accumulate_select(residual, grad, threshold, capacity),
    }
    times = side_by_side(runs, repeats, reset)
    slow = {"torch.topk": lambda: topk(residual, grad, k)}
    times |= side_by_side(slow, max(2, repeats // 5), reset)
    rows: list[list[object]] = []
    records = []
    for name, taken in times.items():
        share = times["a += b"] / taken
        against = taken / times["accumulate + select"]
        rows.append(
            [f"{size:,}", f"{density:g}", threads, name, f"{1e3 * taken:.2f}", f"{share:.0%}", f"{against:.2f}x"]
        )
        records.append({"size": size, "density": density, "threads": threads, "kernel": name, "seconds": taken,
                        "share_of_memory_limit": share, "times_the_fused": against})  # fmt: skip
    return rows, records


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "kernels")
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    cases = [(density, threads) for threads in options.threads for density in (0.01, 0.001)]
    measured = (measure(options.size, density, threads, options.repeats) for density, threads in cases)
    report(HEADERS, measured, options.json)


if __name__ == "__main__":
    main()
