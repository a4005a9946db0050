"""How far connections go: 64 processes meet once, 128 ranks on threads, a message of more than 2 GiB.

python -m stress.meet [--processes 64] [--threads 128] [--gib 2.2]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import oktopk
from oktopk.comm import pack, packed_bytes
from oktopk.utils.processes import Process, local_world, start_processes

_TIMEOUT = 300.0


def meet(processes: int) -> str:
    """So many processes connect, and reduce once, sparse and dense."""
    outputs = _run("meet", processes)
    slowest = max(float(output.split()[0]) for output in outputs)
    return f"{processes} processes met within {slowest:.1f} s; open files of rank 0: {outputs[0].split()[1]}"


def thread_ranks(count: int) -> str:
    """So many ranks on threads reduce a vector; the same bits on all of them."""
    start = time.monotonic()

    def reduce(comm: oktopk.Communicator) -> torch.Tensor:
        x = torch.randn(20_000, generator=torch.Generator().manual_seed(comm.rank))
        return oktopk.sparse_allreduce(x, 0.01, comm=comm)[0]

    results = oktopk.run_threads(count, reduce, timeout=_TIMEOUT)
    if not all(torch.equal(results[0], other) for other in results):
        raise AssertionError("results differ between ranks")
    return f"{count} ranks on threads reduced within {time.monotonic() - start:.1f} s, the same bits"


def large_message(gib: float) -> str:
    """One message of so many GiB between two processes."""
    outputs = _run(f"large {gib}", 2)
    return f"a message of {gib:g} GiB took {float(outputs[1].split()[0]):.1f} s"


def _run(task: str, count: int) -> list[str]:
    command = [sys.executable, "-m", "stress.meet", "--rank", task]
    environment = {"OMP_NUM_THREADS": "1"}
    with local_world(count) as world:
        wanted = [Process({**rank, **environment}, subprocess.PIPE) for rank in world]
        with start_processes(command, wanted) as (ranks, _):
            outputs = [rank.communicate(timeout=4 * _TIMEOUT)[0].decode() for rank in ranks]
    failed = [rank.returncode for rank in ranks if rank.returncode]
    if failed:
        raise AssertionError(f"{len(failed)} of {count} ranks failed")
    return outputs


def _rank(task: str) -> None:
    """One process of it; prints its figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start = time.monotonic()
    comm = oktopk.GroupCommunicator.exclusive(timeout=_TIMEOUT)
    seconds = time.monotonic() - start
    if task == "meet":
        x = torch.ones(1000)
        comm.all_reduce_(x, "sum")
        if x[0] != comm.world or len(comm.all_gather_ints([comm.rank], "ranks")) != comm.world:
            raise AssertionError("wrong sum")
        print(seconds, len(os.listdir("/proc/self/fd")))
    else:
        size = int(float(task.split()[1]) * 2**30)
        start = time.monotonic()
        if comm.rank == 0:
            payload = torch.zeros(size, dtype=torch.uint8)
            payload[-1] = 7
            comm.send(pack(payload), 1, "large")
        else:
            message = comm.recv(packed_bytes(size), 0, "large")
            if message.numel() != packed_bytes(size) or message[-1] != 7:
                raise AssertionError("the message has changed")
        print(time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=128)
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--rank", metavar="TASK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(options.rank)
        return
    for figure in (
        thread_ranks(options.threads),
        large_message(options.gib),
        meet(options.processes),
    ):
        print(figure, flush=True)


if __name__ == "__main__":
    main()
