"""Vectors of more than 2^31 entries: one rank with dense memory, three with sparse vectors alone.

    python -m stress.large.run                       both, for some minutes, in up to 24 GiB
    python -m stress.large.run --entries 5000000     smaller

Prints seconds and peak memory; the exit code is 0 if all results are right.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

import oktopk
from oktopk.algorithms.base import equal_regions, split_and_reduce
from oktopk.wire.message import ValueCode, max_message_bytes
from oktopk.wire.sparse_comm import SparseCommunicator
from oktopk.wire.sparse_vector import SparseVector

ENTRIES = 2**31 + 2**20
DENSITY = 1e-4
SPARSE = 200_000
"""Entries that each of three ranks selects."""
RANKS = 3


def one_rank(size: int) -> None:
    """sparse_allreduce(out=tensor, residual=…): twice, the first with an exact threshold, the second tracked.

    The gradient is small everywhere but at every `stride`-th entry, which must be selected, and at no other.
    """
    stride = round(1 / DENSITY)
    tensor, residual = torch.empty(size), torch.zeros(size)
    state, large = None, slice(stride - 1, None, stride)
    for step in range(2):
        tensor.fill_(1e-3)
        tensor[large] = torch.arange(1.0, tensor[large].numel() + 1)
        start = time.perf_counter()
        mean, info = oktopk.sparse_allreduce(
            tensor, DENSITY, residual=residual, out=tensor, state=state, step=step
        )
        report(f"one rank, {size:,} entries, step {step}: {info.local_count:,} selected", start)
        state = info.state
        assert mean is tensor
        assert not info.skipped
        assert 0.8 * info.target <= info.local_count <= 1.25 * info.target, info
        last = tensor[large][-1]
        assert float(last) == tensor[large].numel(), float(last)
        assert float(residual[large][-1]) == 0.0
        assert int((residual[:stride] == 1e-3 * (step + 1)).sum()) >= stride - 2  # what was not sent is kept


def three_ranks(size: int) -> None:
    """Split, sum, gather and the wire on sparse vectors of that size; no rank has dense memory."""
    edges, start = equal_regions(size, RANKS), time.perf_counter()
    places = torch.arange(SPARSE, dtype=torch.int64) * (size // SPARSE)
    places[-1] = size - 1
    if size < 2**31:
        places = places.to(torch.int32)

    def job(comm: oktopk.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        channel = SparseCommunicator(comm, size)
        mine = SparseVector(places, torch.full((SPARSE,), float(comm.rank + 1)), size)
        sums, _ = split_and_reduce(channel, mine, edges, SPARSE)
        capacity = max_message_bytes(SPARSE, size, ValueCode.FP32)
        result = channel.join(channel.all_gather(sums, capacity, edges, limit=SPARSE))
        assert len(mine.common(result)) == SPARSE
        return result.indices, result.values

    for indices, values in oktopk.run_threads(RANKS, job, timeout=300):
        assert torch.equal(indices, places)
        assert bool(values.eq(6.0).all())
    report(f"three ranks, sparse vectors of {size:,} entries with {SPARSE:,} each", start)


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def report(what: str, start: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {time.perf_counter() - start:.1f} s, at most {peak:.2f} GiB resident", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=ENTRIES, metavar="N")
    options = parser.parse_args()
    three_ranks(options.entries)
    needed, free = 9 * options.entries + 2**30, available_bytes()
    if (
        free < needed
    ):  # the tensor, the residual, and a little: rather nothing than the kernel's out-of-memory killer
        print(f"one rank needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are available", file=sys.stderr)
        return 2
    one_rank(options.entries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
