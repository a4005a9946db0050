"""Ranks that share a host and its link: each exchanges for itself, or one exchanges the average of its host.

First it times three ways to average inside a host, with processes of this machine: shared memory, messages to the
leader, and gloo's reduce. Then it times steps of both forms in network namespaces (needs root), on links that all
ranks of a host share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from common import arguments, write_json
from torch import Tensor

from oktopk.comm import GroupCommunicator, Metered, pack, packed_bytes, unpack
from oktopk.engine.hierarchy.local_group import LocalGroup
from oktopk.errors import OkTopkError
from oktopk.feedback.buckets import Bucket
from oktopk.tools.bench.launch import measure, run_on_loopback
from oktopk.tools.bench.plan import Plan, free_memory
from oktopk.tools.bench.records import Record
from oktopk.tools.lab import lab_problem
from oktopk.tools.tables import format_table

SIZE = 25_557_032
CONTENDERS = (
    *("backward", "oktopk:fp16", "oktopk:fp16:hosts"),
    *("oktopk:fp16:apart", "oktopk:fp16:apart:hosts"),
)
WAYS = ["way to average in a host", "ms", "CPU ms of the leader", "CPU ms of the others, each"]
STEPS = [
    *("link", "contender", "step ms", "best ms", "above backward ms", "CPU ms", "MB sent by a rank"),
    "MB over the host's link",
]


def _by_memory(comm: Metered, grad: Tensor) -> Callable[[], None]:
    host, bucket = LocalGroup(comm, comm.world), Bucket(("all",), (grad.numel(),))
    return lambda: host.reduce(bucket, grad)


def _by_messages(comm: Metered, grad: Tensor) -> Callable[[], None]:
    def run() -> None:
        grad.mul_(1.0 / comm.world)
        if comm.rank:
            comm.send(pack(grad), 0, "gradient")
            return
        for rank in range(1, comm.world):
            grad.add_(unpack(comm.recv(packed_bytes(grad.nbytes), rank, "gradient"), grad.dtype))

    return run


def _by_gloo(comm: Metered, grad: Tensor) -> Callable[[], None]:
    return lambda: dist.reduce(grad.mul_(1.0 / comm.world), 0)


def job(repeats: int) -> None:
    """The program of every rank of the host; rank 0 prints the records."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    comm, grad = Metered(GroupCommunicator(timeout=120)), torch.ones(SIZE)
    makers = {"memory": _by_memory, "messages": _by_messages, "gloo reduce": _by_gloo}
    ways = {name: make(comm, grad) for name, make in makers.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            grad.fill_(1.0)
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - start, time.process_time() - cpu
            dist.barrier()
            assert comm.rank or bool((grad == 1.0).all()), name
            if repeat:  # the first one takes memory
                taken[name].append(spent)
    of_ranks: list[dict[str, list[tuple[float, float]]]] = [{}] * comm.world
    dist.all_gather_object(of_ranks, taken)
    if comm.rank == 0:
        print(json.dumps([_way(name, [rank[name] for rank in of_ranks]) for name in ways]))
    dist.barrier()
    dist.destroy_process_group()


def _way(name: str, ranks: list[list[tuple[float, float]]]) -> Record:
    slowest = [max(seconds for seconds, _ in step) for step in zip(*ranks, strict=True)]
    leader, *others = [statistics.median(cpu for _, cpu in rank) for rank in ranks]
    return {
        "name": name,
        "ranks": len(ranks),
        "median_seconds": statistics.median(slowest),
        "leader_cpu_seconds": leader,
        "others_cpu_seconds": statistics.fmean(others),
    }


def steps(options: argparse.Namespace) -> list[Record]:
    plan = Plan(
        (CONTENDERS,), options.hosts * options.ranks_per_host, steps=options.steps, timeout=options.timeout,
        ranks_per_host=options.ranks_per_host,
    )  # fmt: skip
    return [record for found in measure(plan.fit_to_memory(free_memory()), options.links) for record in found]


def _row(record: Record) -> list[object]:
    names = ("median_step_seconds", "best_step_seconds", "above_backward_seconds", "cpu_seconds")
    moved = [record["sent_bytes"], record["interface_bytes"]]
    return [record["link"], record["name"], *(1e3 * record[name] for name in names), *(b / 1e6 for b in moved)]


def main() -> int:
    parser = arguments(__doc__ or "", "hierarchical")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=["none", "1gbit", "100mbit", "10mbit"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each link")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.job)
        return 0
    if problem := lab_problem():
        parser.error(problem)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        command = [sys.executable, __file__, "--job", str(options.steps)]
        ways = json.loads(run_on_loopback(command, options.ranks_per_host, options.timeout))
        figures = ("median_seconds", "leader_cpu_seconds", "others_cpu_seconds")
        print(
            format_table(WAYS, [[way["name"], *(1e3 * way[figure] for figure in figures)] for way in ways]), "\n"
        )
        records = steps(options)
    except OkTopkError as error:
        print(error, file=sys.stderr)
        return 1
    print(format_table(STEPS, [_row(record) for record in records]))
    write_json(options.json, records, ways=ways)
    return 0


if __name__ == "__main__":
    sys.exit(main())
