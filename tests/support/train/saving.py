"""Checkpoints that say what they are of, and a disk that says what is done to it."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.comm import run_threads
from oktopk.train.checkpoint import snapshot as module
from oktopk.train.checkpoint.snapshot import ModelIdentity, Snapshot
from oktopk.train.checkpoint.storage import Checkpoints

MODEL = ModelIdentity("toy", (("weight", (3, 2)), ("bias", (3,))))


def made(step: int, rank: int, mark: int = 0) -> Snapshot:
    """A state that says what it is of."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * mark)
    shared = {"model": {"weight": torch.randn(3, 2, generator=generator)}, "said": f"step {step}, mark {mark}"}
    own = {
        "buffers": {"mean": torch.full((2,), float(rank)), "count": torch.tensor(step + rank)},
        "random": torch.Generator().get_state()[:64] + rank,
        "task": {"said": f"step {step}, mark {mark}", "rank": rank, "place": (1, [2.5, None, True, 2**63, b"\0"])},
    }
    return Snapshot(step, step // 10, shared, own)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def save(folder: Path, step: int, world: int = 2, mark: int = 0, keep: int = 3) -> None:
    checkpoints = Checkpoints(folder, MODEL, keep)
    run_threads(world, lambda comm: checkpoints.save(comm, made(step, comm.rank, mark)))


def load(folder: Path, world: int = 2) -> list[Snapshot]:
    return run_threads(world, lambda comm: Checkpoints(folder, MODEL).load(comm))


def assert_loads(folder: Path, step: int, world: int = 2, mark: int = 0) -> None:
    assert_made(load(folder, world), step, mark)


def assert_made(snapshots: list[Snapshot], step: int, mark: int = 0) -> None:
    for rank, loaded in enumerate(snapshots):
        expected = made(step, rank, mark)
        assert (loaded.step, loaded.epoch) == (expected.step, expected.epoch)
        assert same(loaded.shared, expected.shared)
        assert same(loaded.own, expected.own)


def where(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def is_rank(rank: int) -> bool:
    return threading.current_thread().name == f"oktopk-rank-{rank}"


class Crash(BaseException):
    """The machine is off: nothing happens any more, no tidying up either."""


class Disk:
    """Stands before what a save does to the disk: `before` is called first, and may raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[str, Path | None], None]) -> None:
        self.before = before
        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            monkeypatch.setattr(os, name, self._guarded(name, getattr(os, name)))
        monkeypatch.setattr(module, "open", self._open, raising=False)

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            self.before(name, None if name == "fsync" else Path(arguments[name == "replace"]))
            return call(*arguments, **keywords)

        return guarded

    def _open(self, path: Path, mode: str) -> io.BufferedIOBase:
        disk = self

        class File(io.BufferedWriter):
            writes = 0

            def write(self, data: Any) -> int:
                self.writes += 1
                try:
                    if self.writes % 12 == 1:  # a file is written in many small pieces
                        disk.before("write", path)
                except BaseException:
                    super().write(bytes(data)[: len(data) // 2])
                    raise
                return super().write(data)

        return File(io.FileIO(path, mode)) if "w" in mode else open(path, mode)
