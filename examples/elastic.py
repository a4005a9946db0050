r"""Elastic training: when hosts join or leave, torchrun restarts the job, and it resumes from the last checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:3 --max-restarts 20 --rdzv-backend c10d \
    --rdzv-endpoint localhost:29400 --rdzv-id digits examples/elastic.py --out run --steps 20000

Start it in three terminals, kill all but the first, then start them again. All ranks must share the folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from common import accuracy, batches, digits, join_or_be_alone, network, options, summary
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.metrics.sinks import MemorySink
from oktopk.train.checkpoint.snapshot import ModelIdentity, Snapshot
from oktopk.train.checkpoint.storage import Checkpoints


class Run:
    """A model, its optimizer, the state of oktopk, and their checkpoints."""

    def __init__(self, out: Path, density: float, warmup_steps: int) -> None:
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.memory = MemorySink()
        self.state = oktopk.OkTopkState(
            density=density, warmup_steps=warmup_steps, auto=False, timeout=60, sinks=[self.memory]
        ).register(self.model, self.optimizer)
        self.checkpoints = Checkpoints(out, ModelIdentity.of("digits", self.model.module))

    def save(self) -> None:
        """All ranks together. Who dies meanwhile leaves the checkpoint before it as it was."""
        shared = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        own = {"oktopk": self.state.state_dict(), "buffers": {}}
        snapshot = Snapshot(self.state.step, 0, shared, own)
        self.state.run(lambda comm: self.checkpoints.save(comm, snapshot))

    def load(self) -> None:
        """From the newest checkpoint, if there is one. If another number of ranks has saved it, these share what
        those have kept back."""
        found: list[Snapshot] = []

        def look(comm: oktopk.Communicator) -> None:
            if self.checkpoints.newest(comm) is not None:
                found.append(self.checkpoints.load(comm))

        self.state.run(look)
        for snapshot in found:
            self.model.module.load_state_dict(snapshot.shared["model"])
            self.optimizer.load_state_dict(snapshot.shared["optimizer"])
            self.state.load_state_dict(snapshot.own["oktopk"])

    def train(self, steps: int, save_every: int) -> None:
        train, _ = digits()
        for x, y in batches(train, dist.get_rank(), dist.get_world_size(), range(self.state.step, steps)):
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if self.state.step % save_every == 0 or self.state.step == steps:
                self.save()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (default: 50)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()
    dist.init_process_group("gloo")
    run = Run(chosen.out, chosen.density, chosen.warmup_steps)
    run.load()
    if dist.get_rank() == 0:
        print(f"begins at step {run.state.step} with {dist.get_world_size()} ranks", flush=True)
    run.train(chosen.steps, chosen.save_every)
    if dist.get_rank() == 0 and run.memory.steps:
        print(summary(dist.get_world_size(), accuracy(run.model.module, digits()[1]), run.memory))
    run.state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
