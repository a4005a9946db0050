"""Checkpoints of a run: whole or not there, and all ranks load the same one."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oktopk
from oktopk.comm import Communicator, run_threads
from oktopk.train.checkpoint import snapshot as module
from oktopk.train.checkpoint.snapshot import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    ModelIdentity,
    Snapshot,
    redistribute_rank_state,
)
from oktopk.train.checkpoint.storage import Checkpoints
from tests.support.train.saving import (
    MODEL,
    Crash,
    Disk,
    assert_loads,
    assert_made,
    is_rank,
    load,
    made,
    same,
    save,
    where,
)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test pulls the plug, so nothing needs to wait for the disk; that it is asked to is tested below."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


# Round trips.


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_was_saved_comes_back_bit_by_bit(tmp_path: Path, world: int) -> None:
    folder = tmp_path / "run" / "checkpoints"
    save(folder, 140, world)
    assert_loads(folder, 140, world)
    ranks = [f"rank-{rank:04d}.pt" for rank in range(world)]
    assert sorted(os.listdir(where(folder, 140))) == sorted([*ranks, "shared.pt", MANIFEST])
    content = json.loads((where(folder, 140) / MANIFEST).read_text())
    assert (content["format"], content["step"], content["epoch"], content["world"]) == (FORMAT, 140, 14, world)
    assert (content["model"]["dnn"], content["model"]["fingerprint"]) == ("toy", MODEL.fingerprint)
    for record in (content["shared"], *content["ranks"]):
        written = (where(folder, 140) / record["name"]).read_bytes()
        assert record["size"] == len(written)
        assert record["sha256"] == hashlib.sha256(written).hexdigest()


def test_through_the_optimizers_worker_a_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def job(comm: Communicator) -> None:
        def start() -> tuple[nn.Module, oktopk.DistributedOptimizer]:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
            inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            return model, oktopk.DistributedOptimizer(inner, model=model, comm=comm, density=0.2, warmup_steps=1)

        def train(model: nn.Module, optimizer: oktopk.DistributedOptimizer, steps: range) -> None:
            for step in steps:
                data = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                model(data).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer = start()
        checkpoints = Checkpoints(tmp_path, ModelIdentity.of("toy", model))
        with optimizer:
            train(model, optimizer, range(3))
            state = optimizer.state_dict()
            own = {"oktopk": state.pop("oktopk"), "buffers": dict(model.named_buffers())}
            shared = {"model": dict(model.named_parameters()), "optimizer": state}
            optimizer.run(lambda comm: checkpoints.save(comm, Snapshot(3, 0, shared, own)))
            train(model, optimizer, range(3, 6))
        again, optimizer = start()
        with optimizer:
            loaded: list[Snapshot] = []
            optimizer.run(lambda comm: loaded.append(checkpoints.load(comm)))
            again.load_state_dict({**loaded[0].shared["model"], **loaded[0].own["buffers"]})
            optimizer.load_state_dict({**loaded[0].shared["optimizer"], "oktopk": loaded[0].own["oktopk"]})
            train(again, optimizer, range(3, 6))
        assert same(dict(model.state_dict()), dict(again.state_dict()))

    run_threads(2, job)


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    part = torch.randn(100_000)[10:20]
    record = module.write_tensors(tmp_path / "rank-0000.pt", {"part": part})
    assert record.size < 10_000
    assert torch.equal(module.read_tensors(tmp_path, record)["part"], part)


def test_a_lack_of_memory_does_not_make_a_file_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint would be loaded instead, and a good one overwritten."""

    def too_little(*args: Any, **options: Any) -> None:
        raise MemoryError

    record = module.write_tensors(tmp_path / "rank-0000.pt", {"part": torch.zeros(3)})
    monkeypatch.setattr(torch, "load", too_little)
    with pytest.raises(MemoryError):
        module.read_tensors(tmp_path, record)


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    bad = replace(made(1, 0), own={"task": {"place": [1, {2}]}})
    with pytest.raises(CheckpointError, match=r"rank 0: rank-0000\['task'\]\['place'\]\[1\] is of type set"):
        run_threads(1, lambda comm: Checkpoints(tmp_path, MODEL).save(comm, bad))
    assert os.listdir(tmp_path) == []


# Interrupted.


def interrupted(act: Callable[[], None], at: int, error: type[BaseException]) -> bool:
    """Whether the act came to its end before the n-th thing it does to the disk."""
    count, lock = 0, threading.Lock()

    def check(operation: str, path: Path | None) -> None:
        nonlocal count
        with lock:
            count += 1
            if count == at or (count > at and error is Crash):
                raise error(errno.EIO, "the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, check)
        try:
            act()
        except CheckpointError:
            assert error is OSError
            return False
        except (Crash, RuntimeError):  # torch.save has some of its own to say
            assert error is Crash
            return False
    return count < at


@pytest.mark.parametrize("error", [Crash, OSError])
@pytest.mark.parametrize(
    ("step", "world"), [(20, 1), (20, 2), (10, 1)], ids=["next", "next on 2", "same step again"]
)
def test_a_save_interrupted_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, error: type[BaseException], step: int, world: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen = set()
    save(tmp_path / "start", 10, world)
    where(tmp_path / "start", 5).mkdir()  # left by an earlier crash
    for at in range(1, 400):
        folder = shutil.copytree(tmp_path / "start", tmp_path / str(at))
        done = interrupted(partial(save, folder, step, world, mark=1, keep=1), at, error)
        caplog.clear()
        loaded = load(folder, world)
        now = loaded[0].shared["said"]
        assert now in ("step 10, mark 0", f"step {step}, mark 1")
        assert_made(loaded, loaded[0].step, mark=int(now[-1]))
        assert not caplog.records  # nothing had to be passed over
        seen.add(now)
        save(folder, 30, world, keep=1)
        assert_loads(folder, 30, world)
        assert os.listdir(folder) == ["step-00000030"]
        if done:
            break
    else:
        pytest.fail("a save never came to its end")
    assert len(seen) == 2


def test_what_a_manifest_speaks_of_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is synced before it gets its name, and its folder after that; only then comes the next."""
    save(tmp_path, 10, 1)
    done: list[str] = []

    def note(operation: str, path: Path | None) -> None:
        done.append(operation if path is None else f"{operation} {path.name}")

    Disk(monkeypatch, note)
    save(tmp_path, 20, 1, keep=1)
    steps = [entry for entry in done if not entry.startswith(("write", "mkdir", "unlink ."))]
    written = ["fsync", "replace rank-0000.pt", "fsync", "fsync", "replace shared.pt", "fsync"]
    committed = ["fsync", f"replace {MANIFEST}", "fsync"]
    removed = [f"unlink {MANIFEST}", "fsync", "unlink rank-0000.pt", "unlink shared.pt", "rmdir step-00000010"]
    assert steps[2:-5] == written + committed  # after two for the folders
    assert steps[-5:-3] + sorted(steps[-3:-1]) + steps[-1:] == removed[:2] + sorted(removed[2:4]) + removed[4:]


def test_only_leftovers_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for step in (5, 8, 20, 30):
        where(tmp_path, step).mkdir()
        (where(tmp_path, step) / ".shared.pt.0123456789abcdef").touch()
    (where(tmp_path, 8) / "notes.txt").touch()
    (tmp_path / "best").mkdir()
    (tmp_path / "notes.txt").touch()
    save(tmp_path, 20)
    assert sorted(os.listdir(tmp_path)) == [
        "best", "notes.txt", "step-00000008", "step-00000010", "step-00000020", "step-00000030",
    ]  # fmt: skip
    assert os.listdir(where(tmp_path, 8)) == ["notes.txt"]
    assert Checkpoints(tmp_path, MODEL).steps() == [10, 20]


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10, 3)

    def full(operation: str, path: Path | None) -> None:
        if is_rank(1) and operation == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    Disk(monkeypatch, full)

    def job(comm: Communicator) -> str:
        try:
            Checkpoints(tmp_path, MODEL, keep=1).save(comm, made(20, comm.rank))
        except CheckpointError as error:
            return str(error)
        return "saved"

    messages = run_threads(3, job)
    assert len(set(messages)) == 1
    assert "step-00000020 could not be saved: rank 1: [Errno 28] No space left on device" in messages[0]
    assert os.listdir(tmp_path) == ["step-00000010"]
    assert_loads(tmp_path, 10, 3)


def test_a_folder_that_ranks_do_not_share_is_noticed_when_saving(tmp_path: Path) -> None:
    def job(comm: Communicator) -> None:
        Checkpoints(tmp_path / str(comm.rank), MODEL).save(comm, made(10, comm.rank))

    with pytest.raises(CheckpointError, match=r"rank-0001.pt, written by rank 1: .* all ranks share"):
        run_threads(2, job)


def test_ranks_at_different_steps_do_not_make_a_checkpoint(tmp_path: Path) -> None:
    def job(comm: Communicator) -> None:
        Checkpoints(tmp_path, MODEL).save(comm, replace(made(10, comm.rank), epoch=comm.rank))

    with pytest.raises(CheckpointError, match="epoch is 0 on rank 0, 1 on rank 1"):
        run_threads(2, job)
    assert os.listdir(tmp_path) == []


# Keeping.


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, 1, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000030", "step-00000040"]


def test_a_damaged_newer_checkpoint_is_ignored_and_later_replaced(tmp_path: Path) -> None:
    for step in (10, 30):
        save(tmp_path, step)
    (where(tmp_path, 30) / "shared.pt").write_bytes(b"")
    save(tmp_path, 20, keep=1)
    assert_loads(tmp_path, 20)
    save(tmp_path, 30, keep=1, mark=1)
    assert_loads(tmp_path, 30, mark=1)
    assert sorted(os.listdir(where(tmp_path, 30))) == [MANIFEST, "rank-0000.1.pt", "rank-0001.1.pt", "shared.1.pt"]


# Damaged.


def flip(path: Path, at: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def turn(path: Path, old: bytes, new: bytes) -> None:
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))


def edit(folder: Path, **entries: Any) -> None:
    """Change a manifest as somebody would who knows how to seal it."""
    content = json.loads((folder / MANIFEST).read_text()) | entries
    del content["sha256"]
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**content, "sha256": seal}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda folder: os.truncate(folder / "shared.pt", 99), "rank 0: shared.pt has 99 bytes, .* 1 more"),
    "one bit": (lambda folder: flip(folder / "shared.pt"), "rank 0: shared.pt is damaged"),
    "one bit of one rank": (lambda folder: flip(folder / "rank-0001.pt"), "rank 1: rank-0001.pt is damaged"),
    "no file of one rank": (lambda folder: os.unlink(folder / "rank-0001.pt"), "rank 1: rank-0001.pt cannot"),
    "empty manifest": (lambda folder: (folder / MANIFEST).write_bytes(b""), "manifest.json cannot be read"),
    "binary manifest": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\0"), "manifest.json cannot be read"),
    "deep manifest": (lambda folder: (folder / MANIFEST).write_text("[" * 99_999), "manifest.json cannot be read"),
    "a list": (lambda folder: (folder / MANIFEST).write_text("[1]"), "sha256 should be of type str"),
    "one digit": (lambda folder: turn(folder / MANIFEST, b'"epoch": 2', b'"epoch": 3'), "digest does not match"),
    "step is text": (lambda folder: edit(folder, step="20"), "step should be of type int, is '20'"),
    "another step": (lambda folder: edit(folder, step=21), "manifest.json belongs to step 21"),
    "true is no number": (lambda folder: edit(folder, epoch=True), "epoch should be of type int"),
    "no ranks": (lambda folder: edit(folder, ranks=None), "ranks should be of type list"),
    "fewer ranks": (lambda folder: edit(folder, ranks=[]), "world 2, 0 ranks"),
    "no model": (lambda folder: edit(folder, model={"dnn": "toy", "parameters": [1]}), "'1' is not a parameter's"),
    "format 0": (lambda folder: edit(folder, format=0), "unknown format 0"),
    "a way out": (
        lambda folder: edit(folder, shared={"name": "../shared.pt", "size": 1, "sha256": ""}),
        "'../shared.pt' is not the name",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_by_all_and_warned_about_once(
    tmp_path: Path, damage: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(where(tmp_path, 20))
    assert_loads(tmp_path, 10)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.message.startswith("skipping checkpoint ")
    assert "step-00000020: " in warning.message
    assert re.search(reason, warning.message), warning.message


def test_no_changed_byte_of_a_manifest_goes_unnoticed(tmp_path: Path) -> None:
    save(tmp_path, 20, 1)
    path = where(tmp_path, 20) / MANIFEST
    whole = path.read_bytes()
    expected = module.read_manifest(path.parent)
    for at in range(0, len(whole), 7):
        flip(path, at)
        with suppress(module.DamagedCheckpoint):
            assert module.read_manifest(path.parent) == expected  # one blank may be as good as another
        path.write_bytes(whole)


def test_what_one_rank_alone_cannot_see_no_rank_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "here", 10, 3)
    save(tmp_path / "there", 10, 3)
    save(tmp_path / "here", 20, 3)

    def job(comm: Communicator) -> tuple[int | None, int]:
        checkpoints = Checkpoints(tmp_path / ("there" if comm.rank == 2 else "here"), MODEL)
        return checkpoints.newest(comm), checkpoints.load(comm).step

    assert run_threads(3, job) == [(20, 10)] * 3
    (warning,) = caplog.records
    assert "rank 2: manifest.json cannot be read: [Errno 2]" in warning.message


def test_ranks_that_see_different_checkpoints_of_a_step_do_not_mix_them(tmp_path: Path) -> None:
    save(tmp_path / "0", 10, mark=0)
    save(tmp_path / "1", 10, mark=1)
    sentence = r"no checkpoint in .* can be used \(step-00000010: ranks see different files\)"
    with pytest.raises(CheckpointError, match=sentence):
        run_threads(2, lambda comm: Checkpoints(tmp_path / str(comm.rank), MODEL).load(comm))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    assert run_threads(2, lambda comm: Checkpoints(folder, MODEL).newest(comm)) == [None, None]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nothing"):
        load(folder)
    assert not folder.exists()


def test_no_code_in_a_file_is_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = tmp_path / "trace"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trace),)

    folder = tmp_path / "checkpoints"
    save(folder, 10)
    zipped = tmp_path / "zipped"
    torch.save({"model": Bomb()}, zipped)
    for step, content in ((20, pickle.dumps(Bomb())), (30, zipped.read_bytes())):
        save(folder, step)
        (where(folder, step) / "shared.pt").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        edit(where(folder, step), shared={"name": "shared.pt", "size": len(content), "sha256": digest})
    assert_loads(folder, 10)
    assert not trace.exists()
    assert [record.message.count("shared.pt cannot be read") for record in caplog.records] == [1, 1]


# Of something else.


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MODEL, dnn="vgg16"), "it holds toy, but this run trains vgg16"),
        (
            ModelIdentity("toy", (("weight", (3, 4)), ("bias", (3,)))),
            r"weight is of shape \[3, 2\] in the checkpoint, of shape \[3, 4\] in the model",
        ),
        (ModelIdentity("toy", MODEL.parameters[:1]), r"bias is of shape \[3\] in the checkpoint, missing in"),
        (ModelIdentity("toy", MODEL.parameters[::-1]), "in another order"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(
    tmp_path: Path, model: ModelIdentity, message: str
) -> None:
    save(tmp_path, 10)
    assert model.fingerprint != MODEL.fingerprint

    def job(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=f"step-00000010 .* does not match the model: .*{message}"):
            Checkpoints(tmp_path, model).load(comm)

    run_threads(2, job)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    edit(where(tmp_path, 20), format=FORMAT + 1, ranks="something new")
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}, .* use a newer oktopk"):
        load(tmp_path)


# Another number of ranks.


PARAMETERS = [("a", nn.Parameter(torch.zeros(40))), ("b", nn.Parameter(torch.zeros(7)))]


def after_some_steps(comm: Communicator) -> dict[str, Any]:
    """What a rank keeps after real sparse steps."""
    with oktopk.AllReducer(PARAMETERS, "oktopk", 0.1, comm, warmup_steps=0) as reducer:
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            reducer.sync({name: torch.randn(p.shape, generator=generator) for name, p in PARAMETERS})
        return reducer.state_dict()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 2), (3, 1)])
def test_another_number_of_ranks_keeps_the_mass(
    tmp_path: Path, before: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    def saving(comm: Communicator) -> dict[str, Any]:
        snapshot = made(10, comm.rank)
        own = {**snapshot.own, "oktopk": after_some_steps(comm)}
        Checkpoints(tmp_path, MODEL).save(comm, replace(snapshot, own=own))
        return own["oktopk"]

    def loading(comm: Communicator) -> Snapshot:
        loaded = Checkpoints(tmp_path, MODEL).load(comm)
        with oktopk.AllReducer(PARAMETERS, "oktopk", 0.1, comm) as reducer:
            reducer.load_state_dict(loaded.own["oktopk"])
            assert reducer.step == 3
        return loaded

    old = run_threads(before, saving)
    with caplog.at_level(logging.INFO, "oktopk.train"):
        new = run_threads(after, loading)
    for name in ("a", "b"):
        was = torch.stack([state["residuals"][name] for state in old]).double().sum(0) / before
        now = torch.stack([snapshot.own["oktopk"]["residuals"][name] for snapshot in new]).double().sum(0) / after
        assert was.any()
        torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-7)
    for snapshot in new:
        assert same(snapshot.shared, made(10, 0).shared)
        mean = torch.full((2,), (before - 1) / 2)
        assert same(snapshot.own["buffers"], {"mean": mean, "count": torch.tensor(10)})
        assert snapshot.own["random"] is snapshot.own["task"] is None
    (said,) = caplog.records
    assert f"was saved by {before} ranks, now there are {after}" in said.message


def test_buffers_of_other_shapes_are_not_averaged() -> None:
    states = run_threads(2, after_some_steps)
    buffers = (torch.zeros(5), torch.tensor([7.0]))
    parts = [{"oktopk": own, "buffers": {"mean": one}} for own, one in zip(states, buffers, strict=True)]
    with pytest.raises(DamagedCheckpoint, match=r"the buffer mean has the shapes \(5,\) and \(1,\)"):
        redistribute_rank_state(parts, 0, 1)


def test_with_another_number_of_ranks_the_files_of_all_old_ones_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saving(comm: Communicator) -> None:
        own = {"buffers": {}, "oktopk": after_some_steps(comm)}
        for step in (10, 20):
            Checkpoints(tmp_path, MODEL).save(comm, Snapshot(step, 0, {}, own))

    run_threads(3, saving)
    flip(where(tmp_path, 20) / "rank-0002.pt")
    assert [loaded.step for loaded in load(tmp_path, 2)] == [10, 10]
    assert "rank 0: rank-0002.pt is damaged" in caplog.text


def test_keep_must_be_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, MODEL, keep=0)
