"""The bare collective on ranks that are threads of one process: what each algorithm sends, and what it keeps.

Every rank has a gradient of its own, adds its residual, and takes part in the allreduce; after some steps the
table shows, per rank and step, what went over the wire and how far that is from a dense allreduce.

    python examples/collective.py --ranks 5 --size 2000000 --density 0.005
"""

from __future__ import annotations

import argparse
import math

import torch

import oktopk


def gradient(size: int, rank: int, step: int) -> torch.Tensor:
    """Heavy-tailed, partly the same on all ranks, different in every step."""
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + 1000 * rank + step)
    scale = torch.randn(size, generator=shared).exp()
    return scale * (0.3 * torch.randn(size, generator=shared) + torch.randn(size, generator=own))


def train(comm: oktopk.Communicator, algorithm: str, size: int, density: float, steps: int) -> list[oktopk.Info]:
    """What a training loop would do with its gradient, a few times."""
    residual, state, infos = torch.zeros(size), None, []
    for step in range(steps):
        mean, info = oktopk.sparse_allreduce(
            gradient(size, comm.rank, step), density, algorithm, residual, comm,
            values="fp16", state=state, step=step,
        )  # fmt: skip
        assert mean.isfinite().all()
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
    torch.set_num_threads(1)

    ranks, size = options.ranks, options.size
    k = max(1, math.floor(size * options.density))
    dense = 2 * 4 * size * (ranks - 1) / ranks
    print(f"{ranks} ranks, {size:,} entries, density {options.density:g}: k = {k:,}, {options.steps} steps each\n")
    print("            selected   result   sent per rank    less than   words per rank   messages")
    print("algorithm    of k       of k    and step (kB)    dense       over k           per rank")
    for algorithm in oktopk.ALGORITHMS:
        runs = oktopk.run_threads(
            ranks, lambda comm, name=algorithm: train(comm, name, size, options.density, options.steps)
        )
        infos = [info for run in runs for info in run]
        sent = sum(i.payload.sent_bytes for i in infos) / len(infos)
        selected = sum(i.local_count for i in infos) / len(infos) / k
        result = sum(i.result_count for i in infos) / len(infos) / k
        messages = sum(i.payload.sent_messages for i in infos) / len(infos)
        less = f"{dense / sent:8.1f}x" if sent else "       -"
        mark = " (modelled)" if infos[0].payload.modelled else ""
        print(
            f"{algorithm:10} {selected:8.2f}  {result:9.2f}  {sent / 1e3:13.1f} {less}"
            f"  {sent / 4 / k:12.2f}  {messages:13.1f}{mark}"
        )
    bound = 6 * (ranks - 1) / ranks
    print(f"\nOk-Topk's bound is 6k(P-1)/P words: {bound:.2f} k here, before coding. What a rank does not send")
    print("stays in its residual and goes out later; nothing is lost.")


if __name__ == "__main__":
    main()
