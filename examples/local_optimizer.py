"""AdamW on every rank, with updates averaged instead of gradients: what adaptive optimizers need.

Each rank clips its own gradient. Without torchrun this process is the only rank.

    python examples/local_optimizer.py
    torchrun --nproc-per-node 2 examples/local_optimizer.py --sync-every 2
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
        "--sync-every", type=int, default=1, help="local steps between exchanges (default: %(default)s)"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")

    train, test = digits()
    model = network()
    memory = MemorySink()
    optimizer = oktopk.LocalOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model=model,  # names of the parameters, and what all ranks start with: those of rank 0
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        sync_every=chosen.sync_every,
        auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
        sinks=[memory],
    )
    schedule = OneCycleLR(optimizer, max_lr=2e-3, total_steps=chosen.steps)
    rank, world = optimizer.run(lambda comm: (comm.rank, comm.world))

    for x, y in batches(train, rank, world, range(chosen.steps)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # this rank's gradient
        optimizer.step()
        schedule.step()

    optimizer.synchronize()  # the same parameters on all ranks: before validating or saving
    if rank == 0:
        print(summary(world, accuracy(model, test), memory))
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
