"""One rank of the link measurement, started by `calibrate.py`; rank 0 prints the result as JSON.

python -m oktopk.tools.simulate.measure.link_times       with RANK and WORLD_SIZE in the environment
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

from ..network import Network

_SMALL, _LARGE, _LARGEST = 64, 1 << 20, 64 << 20
_SEVERAL = 7
_REPEATS, _LARGE_REPEATS = 51, 5
_SECONDS = 0.3
"""Duration of a large message: long enough that the burst of a queue does not matter."""
_TIMEOUT = 300.0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        os.environ.get("OKTOPK_RENDEZVOUS", "env://"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=_TIMEOUT),
    )
    comm = GroupCommunicator.exclusive(timeout=_TIMEOUT)  # like those of training
    found = measure(comm)
    if comm.rank == 0:
        print(json.dumps(asdict(found)))
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def measure(comm: Communicator) -> Network:
    """Measure with small messages, single and several at once, and with large ones; the same result on all ranks.

    The overhead of a message is the extra time of several at once.
    """
    one, several = (_time_shifts(comm, _SMALL, _REPEATS, count) for count in (1, _SEVERAL))
    overhead = max(0.0, (several - one) / (_SEVERAL - 1))
    once = _time_shifts(comm, _LARGE, 3)
    size = int(min(_LARGEST, max(_LARGE, _LARGE * _SECONDS / once)))
    seconds = _time_shifts(comm, size, _LARGE_REPEATS)
    return Network(max(0.0, one - overhead), size / max(seconds - one, 1e-9), overhead)


def _time_shifts(comm: Communicator, size: int, repeats: int, count: int = 1) -> float:
    """Seconds of a shift, in which every rank sends `count` messages to the ranks after it; mean over ranks."""
    message, taken = pack(torch.zeros(size, dtype=torch.uint8)), []
    operation = Operation("shift", "calibration")
    distances = [1 + index % (comm.world - 1) for index in range(count)]
    for _ in range(1 + repeats):
        start = time.perf_counter()
        posted = [comm.post_recv(message.numel(), (comm.rank - d) % comm.world, operation) for d in distances]
        posted += [comm.post_send(message, (comm.rank + d) % comm.world, operation) for d in distances]
        deadline = time.monotonic() + comm.timeout
        for pending in posted:
            pending.wait(deadline)
        taken.append(time.perf_counter() - start)
    total = torch.tensor([statistics.median(taken[1:])], dtype=torch.float64)
    comm.all_reduce_(total, "calibration")
    return total.item() / comm.world


if __name__ == "__main__":
    main()
