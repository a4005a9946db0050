"""One rank of a measurement of the links; `calibrate.py` runs them. Rank 0 says what was found.

python -m oktopk.tools.simulate.shifts       with RANK and WORLD_SIZE in the environment
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from oktopk.comm import Communicator, GroupCommunicator, Operation, pack

from .network import Network

_SMALL, _LARGE, _LARGEST = 64, 1 << 20, 64 << 20
_REPEATS, _LARGE_REPEATS = 51, 5
_SECONDS = 0.3
"""How long a large message should take: long enough that what a queue lets through at once does not matter."""
_TIMEOUT = 300.0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        os.environ.get("OKTOPK_MEETING", "env://"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=_TIMEOUT),
    )
    comm = GroupCommunicator(timeout=_TIMEOUT)
    found = measure(comm)
    if comm.rank == 0:
        print(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def measure(comm: Communicator) -> Network:
    """From messages that are small, and some that are large; the same answer on all ranks."""
    latency = _time_shifts(comm, _SMALL, _REPEATS)
    once = _time_shifts(comm, _LARGE, 3)
    size = int(min(_LARGEST, max(_LARGE, _LARGE * _SECONDS / once)))
    seconds = _time_shifts(comm, size, _LARGE_REPEATS)
    return Network(latency, size / max(seconds - latency, 1e-9))


def _time_shifts(comm: Communicator, size: int, repeats: int) -> float:
    """Seconds of a shift: everybody sends to the next rank and receives from the one before. Mean over ranks."""
    message, taken = pack(torch.zeros(size, dtype=torch.uint8)), []
    operation = Operation("shift", "calibration")
    after, before = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    for _ in range(1 + repeats):
        start = time.perf_counter()
        receiving = comm.post_recv(message.numel(), before, operation)
        sending = comm.post_send(message, after, operation)
        deadline = time.monotonic() + comm.timeout
        receiving.wait(deadline)
        sending.wait(deadline)
        taken.append(time.perf_counter() - start)
    total = torch.tensor([statistics.median(taken[1:])], dtype=torch.float64)
    comm.all_reduce_(total, "calibration")
    return total.item() / comm.world


if __name__ == "__main__":
    main()
