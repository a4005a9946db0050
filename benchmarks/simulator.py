"""Compare the simulator with the lab: the same reductions between hosts in network namespaces (needs root).

All hosts share the cores of this machine, so α, β and γ are measured with as many ranks at once as the job has.
Lab and simulator use the same tensor, density and algorithms. The ratio is simulated over measured time, for steps
without exact thresholds. The exit code is 1 if a ratio is off by more than a quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import arguments, write_json

from oktopk.algorithms import find_algorithm
from oktopk.comm import GroupCommunicator
from oktopk.tools import simulate
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.lab import Lab
from oktopk.tools.simulate.trace.record import RankReducer
from oktopk.tools.tables import format_table

AGE, _SKIPPED = 8, 3
_TOLERANCE = 0.25
HEADERS = ["link", "P", "algorithm", "lab ms", "simulated ms", "ratio", "work ms", "α µs", "Gbit/s"]


def job(algorithms: list[str], size: int, density: float, steps: int) -> None:
    """The program of every host; rank 0 prints the seconds of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    comm = GroupCommunicator.exclusive()
    gradients, found = Gradients(size, comm.rank), {}
    with torch.no_grad():
        for name in algorithms:
            reducing = RankReducer(comm, find_algorithm(name), gradients, density)
            reducing.age(AGE)
            seconds = []
            for step in range(AGE, AGE + _SKIPPED + steps):
                reducing.prepare(step)
                dist.barrier()
                start = time.perf_counter()
                reducing.reduce(step)
                taken = torch.tensor([time.perf_counter() - start])
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                seconds.append(taken.item())
            found[name] = seconds[_SKIPPED:]
    if comm.rank == 0:
        print(json.dumps(found))
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def compare(link: str, hosts: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    words = [*("--algorithms", *options.algorithms), "--size", str(options.size), "--steps", str(options.steps)]
    command = [sys.executable, __file__, "--job", *words, "--density", str(options.density)]
    with Lab(hosts, link) as lab:
        network = simulate.calibrate_in(lab)
        measured = json.loads(lab.run(command, timeout=900)[0].stdout)
    cores = len(os.sched_getaffinity(0))
    costs = simulate.measure(options.algorithms, options.size, options.density, -(-hosts // cores))
    question = simulate.Question([hosts], options.algorithms, options.size, options.density, network)
    records = []
    for one in simulate.simulate(question, costs):
        lab_seconds = statistics.median(measured[one.algorithm])
        records.append({
            "link": link, "hosts": hosts, "algorithm": one.algorithm, "lab_seconds": lab_seconds,
            "simulated_seconds": one.usual_seconds, "ratio": one.usual_seconds / lab_seconds,
            "work_seconds": one.step.work_seconds, "latency": network.latency, "bandwidth": network.bandwidth,
            "lab_steps": measured[one.algorithm],
        })  # fmt: skip
    return records


def row(one: dict[str, Any]) -> list[object]:
    return [
        one["link"], one["hosts"], one["algorithm"], 1e3 * one["lab_seconds"], 1e3 * one["simulated_seconds"],
        one["ratio"], 1e3 * one["work_seconds"], 1e6 * one["latency"], 8e-9 * one["bandwidth"],
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "", "simulator")
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--algorithms", nargs="+", default=["dense", "topka", "oktopk"])
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.algorithms, options.size, options.density, options.steps)
        return
    records: list[dict[str, Any]] = []
    for hosts in options.hosts:
        for link in options.links:
            records += compare(link, hosts, options)
    print(format_table(HEADERS, [row(one) for one in records]))
    write_json(options.json, records)
    worst = max(abs(one["ratio"] - 1) for one in records)
    print(f"the simulator is off by {100 * worst:.0f} % at most")
    raise SystemExit(worst > _TOLERANCE)


if __name__ == "__main__":
    main()
