"""Checkpoints and weights that are damaged or made to do harm: an older one or a clear error, no code run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import oktopk
from oktopk.comm import run_threads
from oktopk.train.checkpoint.snapshot import (
    MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    ModelIdentity,
    Snapshot,
    read_manifest,
    read_tensors,
)
from oktopk.train.checkpoint.state import explain_bad_state, restore_state
from oktopk.train.checkpoint.storage import Checkpoints
from oktopk.train.checkpoint.weights import load_weights
from oktopk.train.config.options import ConfigError

MODEL = ModelIdentity("toy", (("weight", (3, 2)), ("bias", (3,))))
WORLD = 3


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20, by three ranks; the newer one is for harm."""
    checkpoints = Checkpoints(tmp_path, MODEL)
    for step in (10, 20):
        shared = {"parameters": {"weight": torch.full((3, 2), float(step)), "bias": torch.zeros(3)}}
        run_threads(
            WORLD, lambda comm, s=step, d=shared: checkpoints.save(comm, Snapshot(s, 0, d, own(comm.rank)))
        )
    return tmp_path / "step-00000020"


def own(rank: int) -> dict[str, Any]:
    return {"buffers": {"mean": torch.full((2,), float(rank))}, "random": None, "text": "x" * 50}


def loaded_step(folder: Path) -> int:
    """Of the checkpoint that all ranks load."""
    found = run_threads(WORLD, lambda comm: Checkpoints(folder.parent, MODEL).load(comm).step)
    assert len(set(found)) == 1
    return found[0]


def seal(folder: Path, **entries: Any) -> None:
    """Change the manifest as somebody would who knows how to seal it."""
    content = json.loads((folder / MANIFEST).read_text()) | entries
    content.pop("sha256", None)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(content))


def record(content: bytes, name: str = "shared.pt") -> dict[str, Any]:
    return {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def put(folder: Path, content: bytes) -> None:
    """Another shared file, under a manifest that vouches for it."""
    (folder / "shared.pt").write_bytes(content)
    seal(folder, shared=record(content))


# Damaged.


@pytest.mark.parametrize("name", ["shared.pt", "rank-0002.pt", MANIFEST])
def test_cut_anywhere_the_older_one_is_loaded(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 12)):
        (folder / name).write_bytes(whole[:length])
        assert loaded_step(folder) == 10
    (folder / name).write_bytes(whole)
    assert loaded_step(folder) == 20


@pytest.mark.parametrize("name", ["shared.pt", "rank-0002.pt"])
def test_one_bit_anywhere_is_noticed(folder: Path, name: str) -> None:
    manifest = read_manifest(folder)
    found = next(item for item in (manifest.shared, *manifest.ranks) if item.name == name)
    whole = (folder / name).read_bytes()
    for at in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (folder / name).write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match="its digest does not match"):
            read_tensors(folder, found)


def test_damage_that_its_digest_vouches_for(folder: Path) -> None:
    """Whoever damages a file may write a new digest: then torch has to cope, without running what is in it."""
    whole = (folder / "shared.pt").read_bytes()
    outcomes = {True: 0, False: 0}
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        put(folder, bytes(damaged))
        try:
            content = read_tensors(folder, read_manifest(folder).shared)
        except DamagedCheckpoint:
            outcomes[False] += 1
        else:
            assert isinstance(content, dict)
            outcomes[True] += 1
    assert min(outcomes.values()) > 0, outcomes


@pytest.mark.parametrize("name", ["shared.pt", "rank-0001.pt", MANIFEST])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "circle"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    assert loaded_step(folder) == 10


# Made to do harm.


class Bomb:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


@pytest.mark.parametrize("packed", [False, True], ids=["pickle", "torch"])
def test_no_code_in_a_file_is_run(folder: Path, tmp_path: Path, packed: bool) -> None:
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w')"
    calls = ((os.mkdir, str(mark)), (os.system, f"touch {mark}"), (eval, code), (exec, code), (Path.touch, mark))
    for call, argument in calls:
        content = {"parameters": {"weight": Bomb(call, argument)}}
        if packed:
            torch.save(content, tmp_path / "bomb.pt")
        else:
            (tmp_path / "bomb.pt").write_bytes(pickle.dumps(content))
        put(folder, (tmp_path / "bomb.pt").read_bytes())
        assert loaded_step(folder) == 10
        with pytest.raises(ConfigError, match="not a state_dict"):
            load_weights(nn.Linear(2, 3), tmp_path / "bomb.pt")
        assert not mark.exists()


SEALED: dict[str, dict[str, Any]] = {
    "an absolute path": {"shared": record(b"", "/etc/passwd")},
    "a climbing path": {"shared": record(b"", "a/../../shared.pt")},
    "a path with a zero": {"shared": record(b"", "a\0.pt")},
    "a long name": {"shared": record(b"", "a" * 5000 + ".pt")},
    "a name that is none": {"shared": record(b"", "..pt")},
    "a step without end": {"step": 10**4000},
    "a negative step": {"step": -20},
    "a huge file": {"shared": {**record(b""), "size": 10**300}},
    "a negative size": {"shared": {**record(b""), "size": -1}},
    "a number too large": {"epoch": float("inf")},
    "no ranks": {"ranks": [], "world": 0},
    "more ranks than files": {"ranks": [record(b"")] * 10**4, "world": 10**4},
    "wrong types": {"ranks": {"0": 1}, "model": [], "shared": "shared.pt"},
    "shapes of nothing": {"model": {"dnn": "toy", "parameters": [["weight", [float("nan")]]]}},
}


@pytest.mark.parametrize("kind", SEALED)
def test_manifests_that_only_their_seal_vouches_for(folder: Path, kind: str) -> None:
    seal(folder, **SEALED[kind])
    assert loaded_step(folder) == 10


def test_deep_manifests(folder: Path) -> None:
    """Depths that one direction of JSON still copes with and the other one not are among these."""
    for depth in (100, 900, 990, 1000, 5000, 100_000):
        deep = "[" * depth + "]" * depth
        (folder / MANIFEST).write_text(f'{{"sha256": "x", "format": 1, "deep": {deep}}}')
        assert loaded_step(folder) == 10


WITHOUT_STATE: dict[str, Any] = {
    "nothing": {},
    "a list": [1, 2],
    "numbers for parameters": {"parameters": {"weight": 1, "bias": 2}, "optimizer": {}},
    "no parameters": {"parameters": None},
    "one number for all": {"parameters": {"weight": torch.tensor(7.0), "bias": torch.zeros(3)}},
    "another shape": {"parameters": {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}},
    "a sparse tensor": {"parameters": {"weight": torch.eye(3, 2).to_sparse(), "bias": torch.zeros(3)}},
    "parameters alone": {"parameters": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}},
}


class Toy:
    """As much of a task and of its optimizer as restoring needs."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 3)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("this is not a state_dict of oktopk")


@pytest.mark.parametrize("kind", WITHOUT_STATE)
def test_files_that_hold_something_else_are_one_error(kind: str) -> None:
    toy: Any = Toy()
    with pytest.raises(CheckpointError, match="step 20 does not match this run: "), explain_bad_state(20):
        restore_state(toy, toy, WITHOUT_STATE[kind], {"buffers": {}, "oktopk": {}, "random": None})


@pytest.mark.parametrize("state", [torch.zeros(3, dtype=torch.uint8), torch.zeros(3), 7], ids=repr)
def test_random_numbers_that_are_none(state: Any) -> None:
    toy: Any = SimpleNamespace(model=nn.Linear(2, 3), load_state_dict=lambda state: None)
    shared = {"parameters": dict(toy.model.named_parameters()), "optimizer": {}}
    with pytest.raises(CheckpointError, match="step 20 does not match this run: "), explain_bad_state(20):
        restore_state(toy, toy, shared, {"buffers": {}, "oktopk": {}, "random": {"cpu": state}, "task": {}})


@pytest.mark.parametrize("part", [torch.eye(3).to_sparse(), 7, None], ids=lambda part: type(part).__name__)
def test_residuals_that_are_none_change_nothing(part: Any) -> None:
    weights = {"w": nn.Parameter(torch.zeros(100))}
    with oktopk.AllReducer(weights.items(), density=0.1, warmup_steps=0, auto=False) as reducer:
        reducer.sync({"w": torch.arange(100.0)})
        saved = reducer.state_dict()
        with pytest.raises(ValueError, match=r"not a dense floating-point tensor|not a state_dict of oktopk"):
            reducer.load_state_dict({**saved, "step": 77, "residuals": {"w": part}})
        after = reducer.state_dict()
        assert after["step"] == saved["step"]
        assert torch.equal(after["residuals"]["w"], saved["residuals"]["w"])


@pytest.mark.parametrize(
    "error",
    [oktopk.CommError("rank 1 is gone"), CheckpointError("cannot be read"), RuntimeError("no memory is left")],
)
def test_an_error_that_files_are_not_to_blame_for_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_bad_state(20):
        raise error
    assert caught.value is error


# Weights.


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_STATE if kind != "parameters alone"])
def test_weights_that_are_none(tmp_path: Path, kind: str) -> None:
    torch.save(WITHOUT_STATE[kind], tmp_path / "w.pt")
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"--pretrain .*w\.pt: "):
        load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model.weight, before)


def test_weights_from_a_run_without_ranks_or_files(folder: Path) -> None:
    seal(folder, ranks=[], world=0)
    with pytest.raises(ConfigError, match="world 0, 0 ranks"):
        load_weights(nn.Linear(2, 3), folder.parent)
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_weights(nn.Linear(2, 3), folder.parent)


def test_weights_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"w\.pt: not a regular file"):
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")
