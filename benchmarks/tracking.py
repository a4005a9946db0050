"""Measure how closely the tracked thresholds of Ok-Topk follow k, without exact evaluation.

The gradients are heavy-tailed and drift, with growing residuals; the first steps are not counted. For comparison:
exact evaluation on every step, and none at all unless the count leaves the band.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from common import arguments, write_json

import oktopk
from oktopk.algorithms import OkTopk
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.tables import format_table


@dataclass(frozen=True)
class Quality:
    mean_error: float
    inside: float
    worst: float
    exact: float


def quality(counts: list[int], exact: list[bool], k: int) -> Quality:
    ratios = [count / k for count in counts]
    return Quality(
        mean_error=sum(abs(r - 1) for r in ratios) / len(ratios),
        inside=sum(0.8 <= r <= 1.25 for r in ratios) / len(ratios),
        worst=max(abs(r - 1) for r in ratios),
        exact=sum(exact) / len(exact),
    )


def run(size: int, density: float, world: int, start: int, steps: int, algorithm: OkTopk):
    def rank(comm: oktopk.Communicator):
        gradients = Gradients(size, comm.rank)
        residual, state, infos = torch.zeros(size), None, []
        busy = 0.0
        for step in range(start + steps):
            gradient = gradients.at(step)
            began = time.thread_time()
            _, info = oktopk.sparse_allreduce(
                gradient, density, algorithm, residual, comm, out=gradient, state=state, step=step
            )
            busy += time.thread_time() - began if step >= start else 0.0
            state = info.state
            infos.append(info)
        return infos[start:], busy / steps

    results = oktopk.run_threads(world, rank, timeout=300)
    k = results[0][0][0].target
    infos = [info for rank_infos, _ in results for info in rank_infos]
    local = quality([i.local_count for i in infos], [i.exact for i in infos], k)
    overall = list(results[0][0])
    everywhere = quality([i.result_count for i in overall], [i.global_exact for i in overall], k)
    return local, everywhere, max(busy for _, busy in results)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "tracking")
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--start", type=int, default=20, help="steps before counting begins")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, records = [], []
    for density in (0.01, 0.001):
        for label, algorithm in {
            "tracked": OkTopk(),
            "tracked, never due": OkTopk(tau_prime=10**9),
            "exact on every step": OkTopk(tau_prime=1),
        }.items():
            local, overall, cpu = run(
                options.size, density, options.world, options.start, options.steps, algorithm
            )
            for kind, q in (("local", local), ("global", overall)):
                rows.append(
                    [f"{density:g}", label, kind, f"{q.mean_error:.2%}", f"{q.inside:.1%}", f"{q.worst:.1%}",
                     f"{q.exact:.1%}", f"{1e3 * cpu:.2f}"]
                )  # fmt: skip
                records.append({"density": density, "threshold": label, "count": kind, "cpu_s": cpu, **q.__dict__})
    print(f"n = {options.size:,}, P = {options.world}, {options.steps} steps after the first {options.start}\n")
    headers = ["density", "threshold", "count", "mean error", "in [.8, 1.25]", "worst", "exact", "CPU ms/step"]
    print(format_table(headers, rows))
    write_json(options.json, records)


if __name__ == "__main__":
    main()
