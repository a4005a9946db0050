"""A wrapped optimizer, with a learning rate schedule and clipping of the averaged gradient.

The model does not change. Without torchrun this process is the only rank.

    python examples/optimizer.py
    torchrun --nproc-per-node 2 examples/optimizer.py --clip 1
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import accuracy, batches, digits, network, options, summary
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR

import oktopk
from oktopk.metrics.sinks import MemorySink


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--clip", type=float, default=2.0, help="clip the averaged gradient to this norm (default: %(default)s)"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")

    train, test = digits()
    model = network()
    memory = MemorySink()
    optimizer = oktopk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model=model,  # names of the parameters, and what all ranks start with: those of rank 0
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
        sinks=[memory],
    )
    schedule = OneCycleLR(optimizer, max_lr=0.2, total_steps=chosen.steps)
    rank, world = optimizer.rank, optimizer._engine.world

    clipped = 0
    for x, y in batches(train, rank, world, range(chosen.steps)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.synchronize()  # the gradients are those of all ranks from here on
        clipped += bool(clip_grad_norm_(model.parameters(), chosen.clip) > chosen.clip)
        optimizer.step()
        schedule.step()

    if rank == 0:
        print(summary(world, accuracy(model, test), memory))
        print(f"clipped       {clipped} gradients")
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
