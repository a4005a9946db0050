"""Checkpoints: every rank saves its residuals, and a later run resumes bit for bit.

torchrun --nproc-per-node 2 examples/resume.py --out run              # trains and saves
torchrun --nproc-per-node 2 examples/resume.py --out run --resume     # as many steps again
torchrun --nproc-per-node 3 examples/resume.py --out run --resume     # with another number of ranks
torchrun --nproc-per-node 2 examples/resume.py --out run --verify     # stop, resume, and compare with an
uninterrupted run
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


class Run:
    """A model, its optimizer, and the state of oktopk: the content of a checkpoint."""

    def __init__(self, density: float, warmup_steps: int) -> None:
        self.model = DistributedDataParallel(network(), bucket_cap_mb=0.2)  # several buckets, as in larger models
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.memory = MemorySink()
        self.state = oktopk.OkTopkState(
            density=density,
            warmup_steps=warmup_steps,
            auto=False,  # it chooses by the clock: two runs with it need not agree to the bit
            sinks=[self.memory],
        ).register(self.model, self.optimizer)

    def train(self, steps: int) -> None:
        train, _ = digits()
        first = self.state.step
        for x, y in batches(train, dist.get_rank(), dist.get_world_size(), range(first, first + steps)):
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def save(self, out: Path) -> None:
        """One file per rank: residuals differ. Model and optimizer are the same everywhere."""
        folder = out / f"step{self.state.step:06}"
        folder.mkdir(parents=True, exist_ok=True)
        parts = {"model": self.model.module, "optimizer": self.optimizer, "oktopk": self.state}
        torch.save(
            {name: part.state_dict() for name, part in parts.items()}, folder / f"rank{dist.get_rank():04}.pt"
        )
        dist.barrier()  # the checkpoint is complete when all ranks have written

    def load(self, out: Path) -> None:
        folders = sorted(out.glob("step*"))
        if not folders:
            raise SystemExit(f"no checkpoint in {out}: run without --resume first")
        files = sorted(folders[-1].glob("rank*.pt"))
        rank, world = dist.get_rank(), dist.get_world_size()
        saved = torch.load(files[rank % len(files)], weights_only=True)
        if len(files) == world:
            oktopk_state = saved["oktopk"]
        else:  # what the old ranks kept back is shared among the new ones; files are read one at a time
            everyone = (torch.load(file, weights_only=True)["oktopk"] for file in files)
            oktopk_state = oktopk.redistribute(everyone, rank, world)
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(oktopk_state)
        if rank == 0:
            print(f"goes on from step {self.state.step}, saved by {len(files)} ranks, with {world}")


def main() -> None:
    parser = options(__doc__, steps=100)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--verify", action="store_true", help="compare with a run that was not interrupted")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()
    dist.init_process_group("gloo")

    run = Run(chosen.density, chosen.warmup_steps)
    if chosen.resume:
        run.load(chosen.out)
    run.train(chosen.steps)
    run.save(chosen.out)
    if dist.get_rank() == 0:
        print(summary(dist.get_world_size(), accuracy(run.model.module, digits()[1]), run.memory))

    if chosen.verify:
        second = Run(chosen.density, chosen.warmup_steps)  # all new, as in another process
        second.load(chosen.out)
        for each in (run, second):
            each.train(chosen.steps)
        mine, other = (each.model.module.state_dict() for each in (run, second))
        kept, kept_too = (each.state.state_dict()["residuals"] for each in (run, second))
        assert all(torch.equal(mine[name], other[name]) for name in mine), "other parameters"
        assert all(torch.equal(kept[name], kept_too[name]) for name in kept), "other residuals"
        print(f"rank {dist.get_rank()}: {chosen.steps} steps later, parameters and residuals are the same bits")
        second.state.close()
    run.state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
