"""`oktopk train` of a toy, as a worker of torchrun that tells the test where it is, and lets it do its worst.

python job.py FOLDER COURSE

Before step `kill_at` the ranks of the first life wait to lose one of them, before step `join_at` the survivors
wait to be told that somebody has come. FOLDER/notes has what they leave behind: the process of each agent's
worker, the steps that each life has done, and the residuals that each rank has resumed with.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.cli import main
from oktopk.train import run
from oktopk.train.loop import Trainer
from oktopk.train.tasks import WORKLOADS, Shard, Tally, Task, Workload
from oktopk.train.tasks.schedules import exponential_decay

PATIENCE, SAVE_EVERY = 120.0, 10
INPUTS, HIDDEN, BATCH, SAMPLES, VALIDATED, NOISE = 32, 128, 16, 3200, 1000, 0.3

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Course:
    """How many ranks there are at most, and what happens when; for a while there is one rank less."""

    ranks: int
    steps: int
    kill_at: int
    join_at: int

    @property
    def options(self) -> dict[str, Any]:
        """Those of `oktopk train`."""
        return {
            "dnn": "teacher", "max_steps": self.steps, "save_every": SAVE_EVERY, "warmup_steps": 10,
            "density": 0.05, "lr": 0.01, "timeout": 60, "keep": self.steps, "val_every": 1000,
        }  # fmt: skip

    @property
    def resumed_at(self) -> int:
        return self.kill_at // SAVE_EVERY * SAVE_EVERY

    @property
    def rejoined_at(self) -> int:
        """The step in which all hear that somebody has come is finished and saved."""
        return self.join_at + 1


COURSES = {"full": Course(4, 200, 44, 75), "small": Course(2, 40, 24, 29)}


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


@torch.no_grad()
def lessons() -> Batch:
    """What a network of the same kind says of random numbers, with noise: there is a loss to come down to."""
    generator = torch.Generator().manual_seed(7)
    teacher = network(8)
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    x = torch.randn(VALIDATED + SAMPLES, INPUTS, generator=generator)
    said = teacher(x)
    return x, said / said.std() + NOISE * torch.randn(said.shape, generator=generator)


class Teacher(Task[Batch]):
    """Batches are a function of seed, epoch and step."""

    embedded, data, metric = True, "generated numbers", "val loss"

    def __init__(self, share: Shard) -> None:
        self.share, self.model = share, network(HIDDEN)
        self.steps_per_epoch = SAMPLES // (share.world * share.nsteps * share.batch)
        self._x, self._y = lessons()
        generator = torch.Generator().manual_seed(share.seed)  # ranks that are threads share torch's own
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        order = VALIDATED + torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for step in range(first_step, self.steps_per_epoch):
            place = (step * self.share.world + self.share.rank) * self.share.batch
            chosen = order[place : place + self.share.batch]
            yield self._x[chosen], self._y[chosen]

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def samples(self, batch: Batch) -> int:
        return len(batch[0])

    def validate(self) -> Tally:
        own = slice(self.share.rank, VALIDATED, self.share.world)
        loss = F.mse_loss(self.model(self._x[own]), self._y[own], reduction="sum")
        return Tally({"loss": loss.item(), "samples": len(self._x[own])})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"val loss": sums["loss"] / sums["samples"]}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the test did not do its part")
        time.sleep(0.01)


class PacedTrainer(Trainer):
    """Says what it does, and waits where the test has something to do."""

    course: Course

    @property
    def notes(self) -> Path:
        return self.folder.path.parent / "notes"

    @property
    def _rank(self) -> int:
        return self.optimizer.rank

    def resume(self) -> None:
        super().resume()
        said = {"rank": self._rank, "world": self.plan.world, "step": self.done.step}
        kept = self.optimizer._engine.state_dict()["residuals"]
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        torch.save({**said, "residuals": kept, "parameters": parameters}, self.notes / f"resumed-{os.getpid()}.pt")

    def train_step(self, batches: Iterator[Any]) -> bool:
        step, world, course = self.done.step, self.plan.world, self.course
        if world < course.ranks and not (self.notes / "killed").exists():
            self._wait_for_the_others()
        if (step, world) == (course.kill_at, course.ranks) and not (self.notes / "killed").exists():
            self._say_at(step)
            wait_for((self.notes / "killed").exists)
        if (step, world) == (course.join_at, course.ranks - 1):
            self._say_at(step)
            wait_for(lambda: self.stop.signal is not None)
        asked = super().train_step(batches)
        with (self.notes / f"steps-{os.getpid()}").open("a") as file:
            file.write(f"{world} {self._rank} {step}\n")
        return asked

    def _wait_for_the_others(self) -> None:
        """An agent that came late missed the first meeting. When it is there, all are started anew."""
        wait_for(lambda: self.stop.signal is not None)
        os._exit(1)

    def _say_at(self, step: int) -> None:
        (self.notes / f"at-{step}-{self._rank}").touch()


def words(course: Course, out: Path) -> list[str]:
    """The command, as a user would write it."""
    options = course.options.items()
    written = [word for name, value in options for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", *written, "--out", str(out), "--resume"]


if __name__ == "__main__":
    folder, PacedTrainer.course = Path(sys.argv[1]), COURSES[sys.argv[2]]
    (folder / "notes" / f"worker-of-{os.getppid()}").write_text(str(os.getpid()))
    run.Trainer = PacedTrainer  # type: ignore[misc]
    WORKLOADS["teacher"] = Workload(
        *(
            "teacher",
            "numbers",
            lambda source, share: Teacher(share),
            BATCH,
            100,
            exponential_decay(1.5),
            torch.optim.SGD,
        )
    )
    sys.exit(main(words(PacedTrainer.course, folder / "run")))
