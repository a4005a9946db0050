"""The bare collective with every algorithm; the ranks are threads of one process.

Every rank adds its residual to its own gradient and takes part in the all-reduce. After some steps the table
shows, per rank and step, the bytes on the wire and the difference from a dense all-reduce.

    .venv/bin/python examples/collective.py --ranks 5 --size 2000000 --density 0.005
"""

from __future__ import annotations

import argparse
import math
from statistics import fmean as mean

import torch

import oktopk


def gradient(size: int, rank: int, step: int) -> torch.Tensor:
    """Draw a heavy-tailed gradient that is partly the same on all ranks and differs in every step."""
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + 1000 * rank + step)
    scale = torch.randn(size, generator=shared).exp()
    return scale * (0.3 * torch.randn(size, generator=shared) + torch.randn(size, generator=own))


def train(comm: oktopk.Communicator, algorithm: str, size: int, density: float, steps: int) -> list[oktopk.Info]:
    """Reduce a few gradients, as a training loop would."""
    residual, state, infos = torch.zeros(size), None, []
    for step in range(steps):
        result, info = oktopk.sparse_allreduce(
            gradient(size, comm.rank, step), density, algorithm, residual, comm,
            values="fp16", state=state, step=step,
        )  # fmt: skip
        assert result.isfinite().all()
        state = info.state
        infos.append(info)
    return infos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument(
        "--size", type=int, default=1_000_000, help="entries of the gradient (default: %(default)s)"
    )
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of entries to send (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="allreduces per algorithm (default: %(default)s)")
    options = parser.parse_args()
    if options.ranks < 1 or options.size < 1 or options.steps < 1:
        parser.error("--ranks, --size and --steps must be at least 1")
    if not 0 < options.density <= 1:
        parser.error(f"--density must be in (0, 1], got {options.density:g}")
    torch.set_num_threads(1)

    ranks, size = options.ranks, options.size
    k = max(1, math.floor(size * options.density))
    dense = 2 * 4 * size * (ranks - 1) / ranks
    print(f"P = {ranks}, {size:,} entries, density {options.density:g}: k = {k:,}; {options.steps} steps each\n")
    first = ("", "selected", "result", "kB sent", "busiest", "less than", "messages")
    second = ("algorithm", "of k", "of k", "per rank", "rank kB", "dense", "per rank")
    for name, *columns in (first, second):
        print(f"{name:10}", *(f"{column:>10}" for column in columns))
    for algorithm in oktopk.ALGORITHMS:
        runs = oktopk.run_threads(
            ranks, lambda comm, name=algorithm: train(comm, name, size, options.density, options.steps)
        )
        infos = [info for run in runs for info in run]
        sent = mean(i.payload.sent_bytes for i in infos)
        busiest = max(mean(i.payload.sent_bytes + i.payload.received_bytes for i in run) for run in runs)
        less = f"{dense / sent:.1f}x" if sent else "-"
        mark = "  (modelled as a ring)" if infos[0].payload.modelled else ""
        print(
            f"{algorithm:10}  {mean(i.local_count for i in infos) / k:9.2f}"
            f"  {mean(i.result_count for i in infos) / k:9.2f}  {sent / 1e3:9.1f}  {busiest / 1e3:9.1f}  {less:>9}"
            f"  {mean(i.payload.sent_messages for i in infos):9.1f}{mark}"
        )
    print(
        "\nPer step. The busiest rank is the one that sends and receives most: the root of gtopk's tree, for one."
    )
    if ranks > 1:
        raw = 8 * 2 * k * (ranks - 1) / ranks / 1e3
        print(
            f"Ok-Topk's 4k(P-1)/P words would be {raw:.1f} kB uncoded; its bound of 6k(P-1)/P {1.5 * raw:.1f} kB."
        )
    print("What a rank does not send stays in its residual and goes out later; nothing is lost.")


if __name__ == "__main__":
    main()
