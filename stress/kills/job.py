"""A toy that is trained on three ranks and saved after every step, for somebody who kills it."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD
from tqdm import tqdm

from oktopk.train import run
from oktopk.train.config.origins import resolve
from oktopk.train.launch import RankInfo
from oktopk.train.loop import Trainer
from oktopk.train.run_folder import CONFIG
from oktopk.train.stop import Stop
from oktopk.train.tasks import WORKLOADS, Workload
from oktopk.train.tasks.schedules import exponential_decay
from tests.support.train.runs import BATCH, Recipe, built, timeless

P, TIMEOUT = 3, 60.0
OPTIONS: dict[str, Any] = {
    "dnn": "toy", "density": 0.2, "warmup_steps": 4, "max_epochs": 6, "save_every": 1, "keep": 1,
    "timeout": TIMEOUT,
}  # fmt: skip


class Flags:
    """How many saves each rank has begun and ended in this life, in memory that outlives the rank."""

    @classmethod
    def new(cls, path: Path) -> Flags:
        path.write_bytes(bytes(2 * P))
        return cls(path)

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 2 * P)

    def begin(self, rank: int) -> None:
        self._bytes[rank] += 1

    def end(self, rank: int) -> None:
        self._bytes[P + rank] += 1

    @property
    def begun(self) -> list[int]:
        return list(self._bytes[:P])

    @property
    def ended(self) -> list[int]:
        return list(self._bytes[P:])


def fingerprint(trainer: Trainer) -> str:
    """Of all that a run goes on with, to the bit."""
    snapshot = trainer.snapshot()
    parts = [snapshot.shared[name] for name in ("parameters", "optimizer", "progress", "validations")]
    parts += [snapshot.own[name] for name in ("oktopk", "buffers", "random", "task")]
    digest = hashlib.sha256()
    for part in leaves(timeless(parts)):
        raw = part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
        digest.update(raw + b"|")
    return digest.hexdigest()


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name in value:
            yield name
            yield from leaves(value[name])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


def live(connect: Callable[..., Any], folder: Path, notes: Path) -> tuple[list[str], float]:
    """Train to the end, or to the kill. The fingerprint of each save, and the seconds that one takes."""
    seen, seconds, flags = [], 0.0, Flags(notes / "flags")
    resume = (folder / CONFIG).exists()  # as --out FOLDER --resume has it

    class Watched(Trainer):
        def resume(self) -> None:
            super().resume()
            (notes / f"resumed-{self._rank}").write_text(fingerprint(self) if self.done.step else "")

        def save(self) -> None:
            nonlocal seconds
            seen.append(fingerprint(self))
            start = time.monotonic()
            flags.begin(self._rank)
            super().save()
            flags.end(self._rank)
            seconds += time.monotonic() - start

        @property
        def _rank(self) -> int:
            return self.optimizer.rank

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.getLogger("oktopk").setLevel(logging.INFO)  # for train.log
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which somebody must remove after a kill
    toy = ("toy", "numbers", lambda source, share: built(Recipe(), share), BATCH, 2, exponential_decay(1.01), SGD)
    WORKLOADS["toy"] = Workload(*toy)
    run.Trainer = Watched  # type: ignore[misc]
    comm = connect(timeout=TIMEOUT)
    place = RankInfo("test", comm.rank, comm.world)
    run.train_rank(resolve({**OPTIONS, "out": folder}, {}), place, comm, Stop(), resume)
    return seen, seconds / max(1, len(seen))
