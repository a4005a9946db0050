"""A toy workload and whole runs of it, on ranks that are threads: milliseconds per step, and every law of the
training loop can be seen."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from oktopk.comm import Communicator, run_threads
from oktopk.errors import Aborted
from oktopk.train import run as module
from oktopk.train.config.origins import resolve
from oktopk.train.launch import RankInfo
from oktopk.train.loop import Trainer
from oktopk.train.run import Outcome, train_rank
from oktopk.train.stop import Stop
from oktopk.train.tasks import WORKLOADS, Shard, Tally, Task, Workload
from oktopk.train.tasks.schedules import exponential_decay

INPUTS, HIDDEN, BATCH, VALIDATED = 8, 12, 4, 10
_BY_CLOCK = re.compile("_seconds$|hidden_share|per_second|memory_bytes|slowest|(sent|received)_bytes")


@dataclass(frozen=True)
class Batch:
    rank: int
    epoch: int
    step: int
    """Within the epoch."""
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Recipe:
    """What kind of toy. `before` is called ahead of each forward pass; `after` may change the loss."""

    samples: int = 14 * BATCH
    batch_norm: bool = True
    dropout: float = 0.0
    carries: bool = True
    before: Callable[[Regression, Batch], None] = lambda task, batch: None
    after: Callable[[Regression, Batch, Tensor], Tensor] = lambda task, batch, loss: loss
    figures: Callable[[float], dict[str, float]] = lambda loss: {"val loss": loss}


class Regression(Task[Batch]):
    """Batches are a function of seed, epoch and step; a carried state is one of all the batches before."""

    embedded, data, metric = True, "generated numbers", "val loss"

    def __init__(self, recipe: Recipe, share: Shard) -> None:
        self.recipe, self.share = recipe, share
        norm = [nn.BatchNorm1d(HIDDEN)] if recipe.batch_norm else []
        dropout = [nn.Dropout(recipe.dropout)] if recipe.dropout else []
        self.model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), *norm, nn.ReLU(), *dropout, nn.Linear(HIDDEN, 1))
        self.steps_per_epoch = recipe.samples // (share.world * share.nsteps * share.batch)
        generator = torch.Generator().manual_seed(99)
        self._x = torch.randn(VALIDATED + recipe.samples, INPUTS, generator=generator)
        self._y = self._x.sum(1, keepdim=True)
        self.carried = torch.zeros(INPUTS)
        self.losses: list[tuple[int, int, float]] = []
        """Epoch, step and loss of each batch."""

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        share = self.share
        generator = torch.Generator().manual_seed(1000 * share.seed + epoch)
        order = VALIDATED + torch.randperm(self.recipe.samples, generator=generator)
        for step in range(first_step, self.steps_per_epoch):
            for part in range(share.nsteps):
                place = ((step * share.world + share.rank) * share.nsteps + part) * share.batch
                chosen = order[place : place + share.batch]
                yield Batch(share.rank, epoch, step, self._x[chosen], self._y[chosen])

    def loss(self, batch: Batch) -> Tensor:
        self.recipe.before(self, batch)
        if self.recipe.carries:
            self.carried = 0.9 * self.carried + 0.1 * batch.x.mean(0)
        loss = F.mse_loss(self.model(batch.x + self.carried), batch.y)
        loss = self.recipe.after(self, batch, loss)
        self.losses.append((batch.epoch, batch.step, loss.item()))
        return loss

    def validate(self) -> Tally:
        own = slice(self.share.rank, VALIDATED, self.share.world)
        output = self.model(self._x[own])
        return Tally({"loss": F.mse_loss(output, self._y[own], reduction="sum").item(), "samples": len(output)})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        assert sums["samples"] == VALIDATED
        return self.recipe.figures(sums["loss"] / sums["samples"])

    def state_dict(self) -> dict[str, Any]:
        return {"carried": self.carried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.carried = state["carried"]


def built(recipe: Recipe, share: Shard) -> Regression:
    """Weights do not come from torch's generator, which threads share: another rank may just have seeded it."""
    task = Regression(recipe, share)
    generator = torch.Generator().manual_seed(share.seed)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return task


class WatchedSGD(SGD):
    """Notes the norm of the gradient that each step is made of."""

    norms: list[float]

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.__dict__.setdefault("norms", []).append(float(torch.cat([g.flatten() for g in grads]).norm()))
        return super().step(closure)


class WatchedTrainer(Trainer):
    """Notes what there was at the end of each epoch, before it was reset."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lists: list[tuple[list[float], ...]] = []
        self.buffers_before: list[dict[str, Tensor]] = []

    def end_epoch(self) -> None:
        lists = (self.sparsities, self.compression_ratios, self.communication_sizes)
        self.lists.append(tuple(list(entries) for entries in lists))
        self.buffers_before.append(buffers(self))
        super().end_epoch()


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def buffers(trainer: Trainer) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}


@dataclass
class Ran:
    """One run, and what became of it on each rank: an Outcome, or the error that ended it."""

    folder: Path
    ends: list[Outcome | Exception]
    trainers: list[WatchedTrainer]

    @property
    def outcome(self) -> Outcome:
        """That of rank 0; all ranks have ended with the same code."""
        for end in self.ends:
            if isinstance(end, Exception):
                raise end
        codes = {end.code for end in self.ends if isinstance(end, Outcome)}
        assert len(codes) == 1, codes
        first = self.ends[0]
        assert isinstance(first, Outcome)
        return first

    def errors(self, kind: type[Exception]) -> list[str]:
        """What ranks have said that ended with an error of this kind; any others were ended by them."""
        assert {type(end) for end in self.ends} - {Aborted} == {kind}, self.ends
        return [str(end) for end in self.ends if isinstance(end, kind)]

    @property
    def result(self) -> dict[str, Any]:
        return strict_json((self.folder / "result.json").read_text())

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Of metrics.jsonl, one for each step: nothing stands twice."""
        every = [strict_json(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        found = [line for line in every if line["event"] == kind]
        assert len({line["step"] for line in found}) == len(found), kind
        return found

    @property
    def checkpoints(self) -> list[str]:
        return sorted(os.listdir(self.folder / "checkpoints"))

    @property
    def state(self) -> dict[str, Any]:
        """All that the newest checkpoint holds, but for what a clock has measured, and for the random numbers of
        threads, which share a generator."""
        newest = self.folder / "checkpoints" / self.checkpoints[-1]
        manifest = strict_json((newest / "manifest.json").read_text())
        names = [manifest["shared"]["name"], *(record["name"] for record in manifest["ranks"])]
        found = {name.split(".")[0]: timeless(torch.load(newest / name, weights_only=True)) for name in names}
        if len(self.ends) > 1:
            for content in found.values():
                content.pop("random", None)
        return found


@dataclass
class Runs:
    """Makes runs below a folder. Options are those of the command line."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    stops: dict[int, Stop] = field(default_factory=dict)
    """Of each rank of the run that is under way: what a signal would be noted in."""
    started: dict[int, WatchedTrainer] = field(default_factory=dict)
    """The trainers of the run that is under way, by rank."""

    def __post_init__(self) -> None:
        self.monkeypatch.setattr(os, "fsync", lambda handle: None)  # nobody pulls the plug
        self.monkeypatch.setattr(module, "Trainer", WatchedTrainer)

    def __call__(
        self, name: str = "run", world: int = 1, recipe: Recipe | None = None, resume: bool = False, **options: Any
    ) -> Ran:
        workload = Workload(
            *("toy", "numbers", lambda source, share: built(recipe or Recipe(), share)),
            *(BATCH, 2, exponential_decay(1.01), WatchedSGD),
        )
        self.monkeypatch.setitem(WORKLOADS, "toy", workload)
        resolved = resolve({"dnn": "toy", "out": self.folder / name, "compressor": "topka", **options}, {})
        self.stops = {rank: Stop() for rank in range(world)}
        trainers = self.started = {}

        def fit(trainer: WatchedTrainer) -> Any:
            trainers[trainer.optimizer.rank] = trainer
            return Trainer.fit(trainer)

        self.monkeypatch.setattr(WatchedTrainer, "fit", fit)

        ends: dict[int, Outcome | Exception] = {}

        def job(comm: Communicator) -> None:
            place = RankInfo("test", comm.rank, comm.world)
            try:
                ends[comm.rank] = train_rank(resolved, place, comm, self.stops[comm.rank], resume)
            except Exception as error:  # not raised, as that would end the other ranks too: they are to know
                ends[comm.rank] = error

        with logged(), suppress(Exception):  # a reducer that fails has told its world, and each rank its own end
            run_threads(world, job, timeout=30)
        started = [trainers[rank] for rank in sorted(trainers)]
        return Ran(self.folder / name, [ends[rank] for rank in range(world)], started)


@contextmanager
def logged() -> Iterator[None]:
    """As the command line has it, unless the test wants more."""
    logger = logging.getLogger("oktopk")
    level = logger.level
    logger.setLevel(level or logging.INFO)
    yield
    logger.setLevel(level)


def strict_json(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in {text[:200]}")

    return json.loads(text, parse_constant=refuse)


def timeless(value: Any) -> Any:
    """Without what depends on a clock or on the memory that was free, and without bytes on the wire: ranks that
    start again agree again on what they are about to send."""
    if isinstance(value, Mapping):
        return {name: timeless(entry) for name, entry in value.items() if not _BY_CLOCK.search(str(name))}
    return [timeless(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def assert_same(a: Any, b: Any, place: str = "") -> None:
    """Equal to the bit."""
    assert type(a) is type(b), place
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, place
        assert torch.equal(a, b), place
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for name in a:
            assert_same(a[name], b[name], f"{place}[{name!r}]")
    elif isinstance(a, list):
        assert len(a) == len(b), place
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{place}[{i}]")
    else:
        assert a == b, place
