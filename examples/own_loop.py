"""A loop of your own with a whole report: one call per step for the loss, one for each validation.

    torchrun --nproc-per-node 2 examples/own_loop.py --out run
    oktopk report run -o report.html

Rank 0 writes run/metrics.jsonl. What was sent, when, and what auto decided is in it by itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from common import accuracy, batches, digits, join_or_be_alone, network, options, summary
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.metrics.sinks import JSONLSink, MemorySink


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for metrics.jsonl")
    parser.add_argument("--auto", action="store_true", help="use the faster way, dense or sparse")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = digits()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory = MemorySink()
    lines = JSONLSink(chosen.out / "metrics.jsonl") if rank == 0 else None
    state = oktopk.OkTopkState(
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        auto=chosen.auto,
        sinks=[memory] if lines is None else [memory, lines],
    ).register(model, optimizer)

    for step, (x, y) in enumerate(batches(train, rank, world, range(chosen.steps))):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

        mean = loss.detach().clone()
        dist.all_reduce(mean)  # the mean over ranks; the loss of rank 0 would do, too
        if lines is not None:
            lines.record_loss(mean / world, lr=optimizer.param_groups[0]["lr"])
            if (step + 1) % 50 == 0 or step + 1 == chosen.steps:
                lines.record_validation(accuracy=accuracy(model.module, test))

    if rank == 0:
        print(summary(world, accuracy(model.module, test), memory))
        print(state.summary())
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
