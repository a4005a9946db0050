"""Bytes and CPU time of one all-reduce per rank and step, for every algorithm, and how they grow with P.

Ranks are threads of this process, so bytes, messages and CPU time are real, and the network costs nothing.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

import torch
from common import arguments, write_json

import oktopk
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.tables import format_table


@dataclass(frozen=True)
class Cost:
    """Means per step and rank after the start; CPU time is the median, so that exact steps do not count."""

    payload_bytes: float
    control_bytes: float
    messages: float
    cpu_seconds: float
    worst_share: float
    """The most that any rank sent in any step, over Ok-Topk's bound of 2L + 4 ceil(G/P) (P-1) words."""


def run(
    algorithm: str, size: int, density: float, world: int, start: int, steps: int, values: str, indices: str
) -> Cost:
    def rank(comm: oktopk.Communicator) -> torch.Tensor:
        gradients = Gradients(size, comm.rank)
        residual, state, costs = torch.zeros(size), None, []
        for step in range(start + steps):
            gradient = gradients.at(step)
            began = time.thread_time()
            _, info = oktopk.sparse_allreduce(
                gradient, density, algorithm, residual, comm,
                values=values, indices=indices, out=gradient, state=state, step=step,
            )  # fmt: skip
            cpu = time.thread_time() - began
            state = info.state
            if step >= start:
                sent, survivors = info.payload.sent_bytes, math.ceil(info.result_count / world)
                bound = 4 * (2 * info.local_count + 4 * survivors * (world - 1))
                share = sent / bound
                costs.append([sent, info.control.sent_bytes, info.payload.sent_messages, cpu, share])
        return torch.tensor(costs, dtype=torch.float64)

    costs = torch.cat(oktopk.run_threads(world, rank, timeout=600))
    return Cost(*costs[:, :3].mean(0).tolist(), costs[:, 3].median().item(), costs[:, 4].max().item())


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "volume")
    parser.add_argument("--size", type=int, default=14_700_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--start", type=int, default=3, help="steps before counting begins")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--scaling-size", type=int, default=400_000, help="entries in the second table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = []

    rows = []
    dense_bytes = 2 * 4 * options.size * (options.world - 1) // options.world
    for values in ("fp32", "fp16", "e4m3"):
        for name in oktopk.ALGORITHMS:
            if name == "dense" and values != "fp32":
                continue
            cost = run(
                name, options.size, options.density, options.world, options.start, options.steps, values, "coded"
            )
            rows.append([name, values, f"{cost.payload_bytes / 1e6:.3f}", f"{cost.control_bytes / 1e3:.2f}",
                         f"{cost.messages:.1f}", f"{dense_bytes / cost.payload_bytes:.1f}x",
                         f"{1e3 * cost.cpu_seconds:.1f}"])  # fmt: skip
            records.append({"algorithm": name, "values": values, "size": options.size, "world": options.world,
                            **asdict(cost)})  # fmt: skip
    print(f"n = {options.size:,}, density {options.density:g}, P = {options.world}; sent per rank and step")
    print("(dense: modelled, a ring)\n")
    print(format_table(["algorithm", "values", "MB", "control kB", "messages", "less than dense", "CPU ms"], rows))

    cost = run("oktopk", options.size, options.density, options.world, options.start, options.steps, "fp32", "raw")
    records.append({"algorithm": "oktopk", "indices": "raw", "size": options.size, **asdict(cost)})
    print(f"\noktopk with raw indices: {cost.payload_bytes / 1e6:.3f} MB; on any rank in any step at most")
    print(f"{cost.worst_share:.0%} of the bound of 2L + 4 ceil(G/P) (P-1) words, headers included")

    rows = []
    size = options.scaling_size
    k = int(size * options.density)
    names = [name for name in oktopk.ALGORITHMS if name != "dense"]
    for world in (2, 4, 8, 16, 32):
        row: list[object] = [world]
        for name in names:
            cost = run(name, size, options.density, world, options.start, 20, "fp32", "raw")
            row.append(f"{cost.payload_bytes / 4 / (k * (world - 1) / world):.2f}")
            records.append({"algorithm": name, "world": world, "size": size, "k": k, **asdict(cost)})
        rows.append(row)
    print(f"\nwords of 4 bytes sent per rank and step, over k(P-1)/P; n = {size:,}, k = {k:,}; raw indices,")
    print("headers included\n")
    print(format_table(["P", *names], rows))
    write_json(options.json, records)


if __name__ == "__main__":
    main()
