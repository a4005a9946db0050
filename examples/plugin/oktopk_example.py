"""A plug-in for oktopk: an algorithm, a value codec, a sink and a workload (docs/plugins.md).

Once it is installed (`pip install ./examples/plugin`), every command takes their names:

    oktopk train --dnn wave --compressor randomk --values int8 --sinks lines --ranks 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import oktopk
from oktopk.algorithms import Chosen, Reduction, gather_all
from oktopk.kernels import index_dtype
from oktopk.train.tasks import DataSource, Shard, Tally, Task, Workload


@dataclass(frozen=True)
class RandomK(oktopk.Algorithm):
    """All ranks send the same k random entries, others in every step.

    Args:
        seed: of the random entries, the same on all ranks.
    """

    name: ClassVar[str] = "randomk"
    seed: int = 0

    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        picked = acc.select(math.inf, 0)  # adds the gradient to the residual, and finds non-finite numbers
        random = torch.Generator().manual_seed(self.seed + comm.step)
        places = torch.randperm(acc.size, generator=random)[:k].sort().values
        indices = places.to(acc.device, index_dtype(acc.size))
        vector = oktopk.SparseVector(indices, acc.at(indices), acc.size)
        return gather_all(comm, Chosen(vector, threshold=0.0, finite=picked.finite), k, state, state)


class Int8(oktopk.ValueCodec):
    """Whole numbers from -127 to 127, and the largest magnitude as their scale: one byte per value."""

    name, number, width = "int8", 200, 1

    def encode(self, values: Any) -> tuple[Any, float]:
        largest = np.abs(values).max(initial=np.float32(0))
        scale = np.nextafter(np.float32(largest / 127), np.float32(0))  # down: 127 of it must not be infinite
        scale = max(scale, np.finfo(np.float32).tiny)
        return np.rint(values / scale).astype(np.int8).view(np.uint8), float(scale)

    def decode(self, stream: Any, scale: float) -> Any:
        return stream.view(np.int8).astype(np.float32) * np.float32(scale)


class Lines:
    """A sink that writes a line of text for each step."""

    def __init__(self, folder: Path) -> None:
        self.file = open(folder / "lines.txt", "w", encoding="utf-8")  # noqa: SIM115 - close() closes it

    def emit(self, event: oktopk.StepEvent) -> None:
        print(f"step {event.step}: {event.phase}, {event.wire.sent_bytes:,} bytes", file=self.file, flush=True)

    def close(self) -> None:
        self.file.close()


class Wave(Task[Tensor]):
    """A small network learns a wave from random points."""

    embedded, data, metric = True, "points of a wave", "val loss"

    def __init__(self, source: DataSource, shard: Shard) -> None:
        self.shard = shard
        self.steps_per_epoch = 4096 // (shard.world * shard.batch * shard.nsteps)
        self.model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Tensor]:
        for step in range(first_step, self.steps_per_epoch):
            random = np.random.default_rng([self.shard.seed, epoch, step, self.shard.rank])
            for _ in range(self.shard.nsteps):
                yield torch.from_numpy(random.uniform(-2, 2, (self.shard.batch, 1)).astype(np.float32))

    def loss(self, batch: Tensor) -> Tensor:
        return self._error(batch, "mean")

    def validate(self) -> Tally:
        points = torch.linspace(-2, 2, 200)[self.shard.rank :: self.shard.world, None]
        return Tally({"loss": self._error(points, "sum").item(), "samples": float(len(points))})

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"val loss": sums["loss"] / sums["samples"]}

    def _error(self, points: Tensor, reduction: str) -> Tensor:
        points = points.to(next(self.model.parameters()).device)
        return F.mse_loss(self.model(points), torch.sin(3 * points), reduction=reduction)


WAVE = Workload(
    dnn="wave", dataset="wave", build=Wave, batch_size=32, max_epochs=2,
    schedule=lambda lr, position: lr, optimizer=SGD,
)  # fmt: skip
