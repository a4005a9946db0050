"""The same comparison over MPI, with mpi4py and the mpirun beside this Python: ranks on one machine.

DDP's own hooks need gloo or nccl and take no part. Backward is the copy of prepared gradients to the buckets,
which AllReducer gets one after the other; the reference is MPI's own Allreduce of each bucket once all are filled.
Ranks communicate over TCP on loopback, unless --shared-memory allows MPI's shared memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from common import arguments, write_json
from torch import Tensor

import oktopk
from oktopk.feedback.buckets import Bucket, flatten
from oktopk.metrics.sinks import MemorySink
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.bench.names import BACKWARD, OwnContender, parse_contender, warmup_steps
from oktopk.tools.bench.plan import Plan
from oktopk.tools.bench.records import Record, make_record
from oktopk.tools.bench.steps import ReducerReport, TimedStep, time_step
from oktopk.tools.bench.workloads import resnet50_shapes, synthetic_shapes
from oktopk.tools.tables import format_table

ALLREDUCE = "mpi-allreduce"
NAMES = (BACKWARD, ALLREDUCE, *oktopk.ALGORITHMS, "oktopk:fp16", "oktopk:e4m3", "oktopk:fp16:fused")
HEADERS = [
    "",
    "step ms",
    "best ms",
    "dense / it",
    "above backward ms",
    "CPU ms",
    "MB sent",
    "exposed ms",
    "hidden",
]
OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp"}
"""MPICH must not take the short way through memory, nor may UCX below it."""
_PAUSE = 50e-6


class Contender:
    """One way to average the same gradients."""

    def __init__(self, name: str, grads: Mapping[str, Tensor], options: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.grads, self.world, self.in_place = grads, MPI.COMM_WORLD, MPI.IN_PLACE
        self.name, self.memory = name, MemorySink(limit=1)
        own = parse_contender(name) or OwnContender("dense", "fp32")
        self.reducer = oktopk.AllReducer(
            [(layer, torch.empty_like(grad, requires_grad=True)) for layer, grad in grads.items()],
            own.algorithm, options.density, oktopk.MPICommunicator(timeout=options.timeout),
            warmup_steps=0, values=own.values, fusion_entries=own.fusion_entries, sinks=[self.memory],
        )  # fmt: skip
        self.flat = {bucket: torch.zeros(bucket.size) for bucket in self.reducer.buckets}

    def step(self) -> TimedStep:
        run: Callable[[], object] = {BACKWARD: self._backward, ALLREDUCE: self._allreduce}.get(
            self.name, self._step
        )
        return time_step(run, False, self._report, self._barrier)

    def _report(self, start: float) -> ReducerReport:
        return ReducerReport.of(self.memory.steps[-1], start) if parse_contender(self.name) else ReducerReport()

    def _barrier(self) -> None:
        """A barrier without spinning: waiting ranks must not take cores from working ones."""
        request = self.world.Ibarrier()
        while not request.Test():
            time.sleep(_PAUSE)

    def _fill(self, bucket: Bucket) -> Tensor:
        flatten(bucket, self.grads, self.flat[bucket])
        return self.flat[bucket]

    def _backward(self) -> None:
        for bucket in self.flat:
            self._fill(bucket)

    def _allreduce(self) -> None:
        self._backward()
        for flat in self.flat.values():
            self.world.Allreduce(self.in_place, flat.mul_(1 / self.world.size).numpy())

    def _step(self) -> None:
        for bucket in self.flat:
            self.reducer._engine.submit(bucket, self._fill(bucket))
        self.reducer._engine.finish()


def job(options: argparse.Namespace) -> None:
    """The program of every rank; rank 0 prints the records."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    shapes = resnet50_shapes() if options.params is None else synthetic_shapes(options.params)
    gradients = Gradients(sum(map(math.prod, shapes)), world.rank)
    parts = gradients.buffer.split([math.prod(shape) for shape in shapes])
    grads = {f"layer{index}": part for index, part in enumerate(parts)}
    contenders = {name: Contender(name, grads, options) for name in NAMES}
    steps: dict[str, list[TimedStep]] = {name: [] for name in NAMES}
    for step in range(-max(map(warmup_steps, NAMES)), options.steps):
        gradients.at(step)
        for name, contender in contenders.items():
            timed = contender.step()
            if step >= 0:
                steps[name].append(timed)
    of_ranks = world.gather(steps)
    if of_ranks is not None:
        plan = Plan(((BACKWARD,),), world.size, density=options.density, steps=options.steps)
        size = gradients.buffer.numel()
        print(json.dumps([make_record(plan, size, name, [rank[name] for rank in of_ranks]) for name in NAMES]))
    for contender in contenders.values():
        contender.reducer.close()


def compare(records: list[Record]) -> list[Record]:
    """Compare with backward alone, and with the faster of both dense all-reduces."""
    medians = {record["name"]: record["median_step_seconds"] for record in records}
    dense = min(medians[ALLREDUCE], medians["dense"])
    for record in records:
        record["dense_over_it"] = dense / record["median_step_seconds"]
        record["above_backward_seconds"] = record["median_step_seconds"] - medians[BACKWARD]
    return records


def row(record: Record) -> list[object]:
    seconds = [record[name] for name in ("above_backward_seconds", "cpu_seconds")]
    sent, exposed, hidden = (record[name] for name in ("sent_bytes", "exposed_seconds", "hidden_share"))
    return [
        record["name"], 1e3 * record["median_step_seconds"], 1e3 * record["best_step_seconds"],
        record["dense_over_it"], *(1e3 * one for one in seconds), None if sent is None else sent / 1e6,
        None if exposed is None else 1e3 * exposed, None if hidden is None else f"{100 * hidden:.0f} %",
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "", "mpi")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--params", type=int, help="instead of ResNet-50's shapes")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the whole")
    parser.add_argument("--shared-memory", action="store_true", help="let ranks talk through memory, not TCP")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options)
        return
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        parser.error("MPI needs mpi4py and an MPI library: pip install 'oktopk[mpi]'")
    way = {} if options.shared_memory else OVER_TCP
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **way}
    command = [mpirun, "-np", str(options.ranks), sys.executable, __file__, "--job", *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=options.timeout, check=True, env=environment)
    records = compare(json.loads(done.stdout))
    print(format_table(HEADERS, [row(record) for record in records]))
    print("MB sent: of dense those of a ring; the inside of MPI's allreduce cannot be seen")
    write_json(options.json, records)


if __name__ == "__main__":
    main()
