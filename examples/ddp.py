"""Add the hook to a DistributedDataParallel model, in one line.

python examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --density 0.01
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import accuracy, batches, digits, join_or_be_alone, network, options, summary
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.metrics.sinks import MemorySink


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = digits()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory = MemorySink()

    # The one line. Given the optimizer, it leaves out steps whose gradients are not finite.
    state = oktopk.OkTopkState(
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
        sinks=[memory],
    ).register(model, optimizer)
    # The same in PyTorch's own words, where parameters have numbers instead of names:
    #     model.register_comm_hook(state, oktopk.oktopk_hook)
    #     state.guard(optimizer)

    for x, y in batches(train, rank, world, range(chosen.steps)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # gradients are averaged while backward still runs
        optimizer.step()

    if rank == 0:
        print(summary(world, accuracy(model.module, test), memory))
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
