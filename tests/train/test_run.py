"""A run from its options to its files: stopped and gone on with, done again, and kept from doing harm."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import pytest
import torch

from oktopk.train import run as module
from oktopk.train import run_folder
from oktopk.train.checkpoint import snapshot
from oktopk.train.checkpoint.replicas import checksum
from oktopk.train.checkpoint.snapshot import CheckpointError
from oktopk.train.config.options import ConfigError
from oktopk.train.run_folder import RunFolder
from oktopk.utils.files import write_atomically
from tests.support.disks import fill_disk
from tests.support.train.runs import BATCH, Batch, Ran, Recipe, Regression, Runs, assert_same, parameters, timeless

Hook = Callable[[Regression, Batch], None]


class KilledError(Exception):
    pass


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Stopping and going on.


def assert_same_run(one: Ran, other: Ran) -> None:
    """Parameters, buffers, optimizer, residuals, random numbers, the task's state, sums and figures."""
    assert_same(one.state, other.state)
    assert_same(timeless(one.result), timeless(other.result))
    for kind in ("epoch", "validation"):
        assert_same(timeless(one.lines(kind)), timeless(other.lines(kind)))
    losses = [[(line["step"], line["loss"], line["lr"]) for line in ran.lines("train")] for ran in (one, other)]
    assert losses[0] == losses[1]


def stopping(runs: Runs, epoch: int, step: int, number: Signals, rank: int = 0) -> Hook:
    def stop(task: Regression, batch: Batch) -> None:
        if (batch.rank, batch.epoch, batch.step) == (rank, epoch, step):
            runs.stops[rank].signal = number

    return stop


@pytest.mark.parametrize("number", [Signals.SIGINT, Signals.SIGTERM])
@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_run_that_is_interrupted_and_resumed_is_the_same_to_the_bit(
    runs: Runs, number: Signals, step: int
) -> None:
    """With dropout and a carried state, in the sparse phase; also after the last step of an epoch."""
    options = {"max_epochs": 4, "warmup_steps": 4, "density": 0.2, "compressor": "oktopk"}
    recipe = {"samples": 6 * BATCH, "dropout": 0.3}
    whole = runs("whole", recipe=Recipe(**recipe), **options)
    stop = stopping(runs, 1, step, number)
    cut = runs("cut", recipe=Recipe(**recipe, before=stop), **options)
    assert cut.outcome.code == 128 + number
    assert not cut.result["finished"]
    assert cut.result["steps"] == 6 + step + 1
    assert [line["epoch"] for line in cut.lines("epoch")] == [0]
    assert f"{number.name}: saved after step {7 + step}" in (cut.folder / "train.log").read_text()
    torch.rand(7)  # another process would not have these random numbers
    resumed = runs("cut", recipe=Recipe(**recipe), resume=True, **options)
    assert resumed.outcome.code == 0
    assert resumed.trainers[0].optimizer._engine.state_dict()  # residuals are part of what is compared
    assert_same_run(whole, resumed)


def test_a_run_with_a_measured_density_repeats_from_its_result(runs: Runs) -> None:
    """Its densities are the clock's; those of the second run are in the result of the first."""
    options = {"world": 2, "max_epochs": 2, "warmup_steps": "auto", "warmup_values": "bf16"}
    recipe = Recipe(samples=40 * BATCH * 2)
    first = runs("first", recipe=recipe, density="auto", **options)
    assert first.result["density"] == "auto"
    assert first.result["schedule"].startswith("0:dense,1:0.25,")
    plan = json.loads((first.folder / "plan.json").read_text())
    assert (plan["dense_steps"], plan["sparse_steps"], plan["ramp_steps"]) == (1, 79, 7)
    assert "a density of 0.01 to 0.25 by measurement" in (first.folder / "train.log").read_text()
    again = runs("again", recipe=recipe, density=first.result["schedule"], **options)
    assert again.result["schedule"] == first.result["schedule"]
    for one, other in zip(first.trainers, again.trainers, strict=True):
        assert torch.equal(parameters(one), parameters(other))
    losses = [[(line["step"], line["loss"]) for line in ran.lines("train")] for ran in (first, again)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_stopped_in_the_steps_that_max_steps_ends_is_still_finished(runs: Runs, step: int) -> None:
    """Item 15: an epoch of which all steps are done is yet to be summarised and validated."""
    options = {"max_epochs": 2, "max_steps": 4}
    whole = runs("whole", **options)
    runs("cut", recipe=Recipe(before=stopping(runs, 0, step, Signals.SIGTERM)), **options)
    resumed = runs("cut", resume=True, **options)
    assert [line["epoch"] for line in resumed.lines("validation")] == [0]
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(runs: Runs, world: int) -> None:
    def die(task: Regression, batch: Batch) -> None:
        if (batch.epoch, batch.step) == (1, 4):
            raise KilledError

    options = {"world": world, "max_epochs": 3, "warmup_steps": 4, "density": 0.2, "save_every": 4}
    recipe = {"samples": 6 * BATCH * world, "dropout": 0.3 if world == 1 else 0.0}  # threads share a generator
    whole = runs("whole", recipe=Recipe(**recipe), **options)
    killed = runs("cut", recipe=Recipe(**recipe, before=die), **options)
    assert len(killed.errors(KilledError)) == world
    assert killed.checkpoints == ["step-00000004", "step-00000006", "step-00000008"]
    torch.rand(7)
    resumed = runs("cut", recipe=Recipe(**recipe), resume=True, **options)
    assert [line["step"] for line in resumed.lines("train")] == list(range(18))
    assert_same_run(whole, resumed)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(runs: Runs) -> None:
    def die(task: Regression, batch: Batch) -> None:
        raise KilledError

    runs("cut", world=2, recipe=Recipe(before=die)).errors(KilledError)
    assert_same_run(runs("whole", world=2), runs("cut", world=2, resume=True))


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_cut_by_max_steps_and_made_longer_is_the_same_as_a_whole_one(runs: Runs, world: int) -> None:
    recipe = Recipe(samples=6 * BATCH * world)
    options = {"max_epochs": 3, "warmup_steps": 4, "density": 0.2}
    whole = runs("whole", world, recipe, **options)
    cut = runs("cut", world, recipe, max_steps=8, **options)
    assert cut.outcome.result["steps"] == 8
    assert cut.lines("validation")[-1]["epoch"] == 1
    longer = runs("cut", world, recipe, resume=True, **options)
    assert longer.outcome.result["steps"] == whole.outcome.result["steps"] == 18
    shared, expected = longer.state, whole.state
    for state in (shared, expected):
        state["shared"].pop("validations")  # the cut one has one more
    assert_same(shared, expected)
    assert [line["step"] for line in longer.lines("train")] == list(range(18))


def test_files_have_no_step_twice_after_a_crash(runs: Runs) -> None:
    def killed(task: Regression, batch: Batch) -> None:
        if (batch.epoch, batch.step) == (1, 4):
            raise KilledError

    runs("run", recipe=Recipe(before=killed), max_epochs=2)
    ran = runs("run", resume=True, max_epochs=2)
    assert ran.outcome.code == 0
    for kind in ("train", "step", "reduction"):
        assert [line["step"] for line in ran.lines(kind)] == list(range(28))
    rows = (ran.folder / "timing.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(28))]


def test_options_given_to_a_resumed_run_count(runs: Runs) -> None:
    runs("run", max_epochs=1)
    ran = runs("run", resume=True, max_epochs=2, momentum=0.1, weight_decay=0.5)
    groups = ran.trainers[0].optimizer.param_groups
    assert {(group["momentum"], group["weight_decay"]) for group in groups} == {(0.1, 0.5)}


def test_a_resume_that_fails_leaves_the_run_as_it_was(runs: Runs) -> None:
    first = runs("run", max_epochs=1)
    before = contents(first.folder)
    runs("run", recipe=Recipe(batch_norm=False), resume=True, max_epochs=2).errors(CheckpointError)
    after = contents(first.folder)
    log = str(first.folder / "train.log")
    assert {name: after[name] for name in before if name != log} == {n: b for n, b in before.items() if n != log}


def test_a_run_whose_checkpoints_are_all_damaged_says_which_and_what_to_do(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    """One sentence on every rank, no warnings beside it; what it advises works."""
    ran = runs("run", world=2, max_epochs=2)
    folder = ran.folder / "checkpoints"
    assert ran.checkpoints == ["step-00000007", "step-00000014"]
    (folder / "step-00000014" / "manifest.json").write_text("{}")
    content = bytearray((folder / "step-00000007" / "rank-0001.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "step-00000007" / "rank-0001.pt").write_bytes(content)
    caplog.clear()
    for said in runs("run", world=2, resume=True, max_epochs=3).errors(CheckpointError):
        assert said.startswith(f"no checkpoint in {folder} can be used (step-00000014: rank 0: manifest.json: ")
        assert "; step-00000007: rank 1: rank-0001.pt is damaged: its digest does not match): " in said
        assert said.endswith("copy an intact one back, or remove that folder to start again at step 0")
    assert "skipping" not in caplog.text
    assert "continue from the last checkpoint" not in caplog.text
    shutil.rmtree(folder)
    assert runs("run", world=2, resume=True, max_epochs=3).outcome.result["steps"] == 21


def test_a_run_that_goes_on_has_no_result_until_it_ends(runs: Runs) -> None:
    def killed(task: Regression, batch: Batch) -> None:
        if batch.epoch == 1:
            raise KilledError

    runs("run", max_epochs=1)
    ran = runs("run", recipe=Recipe(before=killed), resume=True, max_epochs=2)
    ran.errors(KilledError)
    assert not (ran.folder / "result.json").exists()


def test_a_signal_to_one_rank_ends_all_of_them_after_the_same_step(runs: Runs) -> None:
    options = {"world": 3, "max_epochs": 2, "warmup_steps": 4, "density": 0.2}
    recipe = {"samples": 6 * BATCH * 3}
    whole = runs("whole", recipe=Recipe(**recipe), **options)
    stop = stopping(runs, 1, 2, Signals.SIGTERM, rank=1)
    cut = runs("cut", recipe=Recipe(**recipe, before=stop), **options)
    assert cut.outcome.code == 128 + Signals.SIGTERM  # on all ranks
    assert [trainer.done.step for trainer in cut.trainers] == [9, 9, 9]
    assert_same_run(whole, runs("cut", recipe=Recipe(**recipe), resume=True, **options))


def test_another_number_of_ranks_goes_on_and_finishes(runs: Runs) -> None:
    options = {"max_epochs": 3, "warmup_steps": 4, "density": 0.2}
    recipe = {"samples": 36 * BATCH}
    stop = stopping(runs, 1, 8, Signals.SIGTERM)
    cut = runs(world=2, recipe=Recipe(**recipe, before=stop), **options)
    assert cut.result["steps"] == 18 + 9
    grown = runs(world=3, recipe=Recipe(**recipe), resume=True, **options)
    assert grown.outcome.code == 0
    assert grown.result["finished"]
    # Half of epoch 1 was behind it: 6 of 12 steps remain, and 12 of epoch 2.
    assert grown.result["steps"] == 27 + 6 + 12
    assert [line["epoch"] for line in grown.lines("epoch")] == [0, 1, 2]
    phases = grown.result["phases"]
    assert (phases["dense"]["steps"], phases["sparse"]["steps"]) == (4, 41)


@pytest.mark.parametrize("world", [1, 2])
def test_a_finished_run_resumed_does_nothing_and_keeps_its_result(runs: Runs, world: int) -> None:
    ran = runs(max_epochs=2, warmup_steps=4)
    before = contents(ran.folder)
    again = runs(world=world, max_epochs=2, warmup_steps=4, resume=True)
    assert again.outcome.code == 0
    assert again.trainers[0].lists == []
    after = contents(ran.folder)
    changed = {Path(path).name for path in after if after[path] != before.get(path)}
    logs = {name for name in changed if name.startswith(("train.log", "events.out"))}
    assert changed - logs == (set() if world == 1 else {"result.json"})  # it has the number of ranks in it
    assert again.result["phases"] == ran.result["phases"]
    assert again.result["validations"] == ran.result["validations"]


# The same again.


def test_a_seed_decides_everything(runs: Runs) -> None:
    sums, states = [], []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        ran = runs(name, recipe=Recipe(dropout=0.3), max_epochs=1, warmup_steps=4, seed=seed)
        sums.append(checksum(ran.trainers[0].model.parameters()))
        states.append(ran)
        torch.rand(5)
    assert sums[0] == sums[1] != sums[2]
    assert_same_run(states[0], states[1])


def test_all_ranks_have_the_same_parameters_in_the_end(runs: Runs) -> None:
    recipe = Recipe(samples=14 * BATCH * 3)
    ran = runs(world=3, recipe=recipe, max_epochs=1, warmup_steps=4, compressor="oktopk", density=0.1)
    assert ran.result["phases"]["sparse"]["steps"] == 10
    for trainer in ran.trainers[1:]:
        assert torch.equal(parameters(trainer), parameters(ran.trainers[0]))


# Bad input.


def test_a_folder_that_holds_a_run_is_not_written_over(runs: Runs) -> None:
    ran = runs(max_epochs=1)
    before = contents(ran.folder)
    refused = runs(world=2, max_epochs=1, seed=5)
    for said in refused.errors(ConfigError):
        assert f"{ran.folder} already holds a run" in said
        assert "--resume" in said
    assert contents(ran.folder) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused_on_all_ranks_and_free_again_after_a_kill(runs: Runs, resume: bool) -> None:
    """The holder is another process, which ends by SIGKILL while a child of it lives on."""
    ran = runs("run", max_epochs=1)
    hold = "import os, sys, time; from pathlib import Path; from oktopk.utils.locks import FolderLock; "
    hold += "lock = FolderLock(Path(sys.argv[1])); child = os.fork(); "
    hold += "child and print(child, flush=True); time.sleep(600)"
    before = contents(ran.folder)
    with subprocess.Popen([sys.executable, "-c", hold, ran.folder], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            before[str(ran.folder / ".lock")] = (ran.folder / ".lock").read_bytes()
            refused = runs("run", world=2, resume=resume, max_epochs=2)
            for said in refused.errors(ConfigError):
                who = f"process {holder.pid} on {socket.gethostname()}"
                assert said.startswith(f"{ran.folder} is in use by {who}: wait until that run has ended")
            assert contents(ran.folder) == before
            holder.kill()
            holder.wait()
            assert runs("run", world=2, resume=True, max_epochs=2).outcome.code == 0
        finally:
            os.kill(child, signal.SIGKILL)
            holder.kill()


def test_the_second_of_two_runs_is_refused_while_the_first_trains(runs: Runs, tmp_path: Path) -> None:
    """Before the first has written anything but its lock and log: what it would write over comes later."""
    seen: list[str] = []

    def second(task: Regression, batch: Batch) -> None:
        if not seen:
            with pytest.raises(ConfigError) as refused:
                RunFolder(tmp_path / "run", writes=True)
            seen.append(str(refused.value))

    assert runs("run", recipe=Recipe(before=second), max_epochs=1).outcome.code == 0
    assert f"is in use by process {os.getpid()} on" in seen[0]


def test_a_run_that_came_and_went_since_the_first_look_is_kept(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = runs("run", max_epochs=1)
    before = contents(ran.folder)
    monkeypatch.setattr(module, "check_folder", lambda path, resume: None)
    for said in runs("run", max_epochs=1).errors(ConfigError):
        assert "already holds a run" in said
    assert contents(ran.folder) == before


def test_a_file_in_the_way_of_the_folder_is_named_on_all_ranks(runs: Runs) -> None:
    (runs.folder / "run").write_text("precious")
    refused = runs(world=2, max_epochs=1)
    assert all(isinstance(end, module.BAD_INPUT) for end in refused.ends)
    for end in refused.ends:
        assert str(runs.folder / "run") in str(end)
        assert "exists" in str(end)
    assert (runs.folder / "run").read_text() == "precious"


def test_a_folder_that_rank_0_may_not_look_into_ends_all_ranks(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, resume: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module, "check_folder", refuse)
    for said in runs(world=2, max_epochs=1).errors(ConfigError):
        assert "Permission denied" in said


def test_ranks_with_other_options_are_found_out(runs: Runs) -> None:
    real = module.to_toml
    texts = iter("ab")

    def differs(resolved: object) -> str:
        return real(resolved) + next(texts)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "to_toml", differs)
        for said in runs(world=2, max_epochs=1).errors(ConfigError):
            assert "ranks disagree on the options" in said
    assert not os.path.exists(runs.folder / "run")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_ends_all_ranks_and_the_old_checkpoint_resumes(runs: Runs, rank: int) -> None:
    """In the second save one rank's disk is full."""
    real = snapshot.write_hashed
    options = {"world": 2, "max_epochs": 4, "warmup_steps": 4, "density": 0.2}
    recipe = Recipe(samples=6 * BATCH * 2)
    whole = runs("whole", recipe=recipe, **options)

    def full(path: Path, write: Callable[[snapshot.HashingFile], object]) -> snapshot.FileRecord:
        if path.parent.name == "step-00000012" and path.name.startswith(f"rank-{rank:04d}"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, write)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "write_hashed", full)
        ran = runs("cut", recipe=recipe, **options)
    for said in ran.errors(CheckpointError):
        assert f"rank {rank}" in said
        assert "No space left on device" in said
    assert ran.checkpoints == ["step-00000006"]
    assert_same_run(whole, runs("cut", recipe=recipe, resume=True, **options))


def test_metrics_on_a_full_disk_do_not_end_the_run(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Each file is switched off with one warning, training is the same, and a resumed run writes again."""

    def fill(task: Regression, batch: Batch) -> None:
        if (batch.rank, batch.epoch, batch.step) == (0, 0, 3):
            fill_disk(runs.folder / "cut")

    options = {"world": 2, "max_epochs": 2, "warmup_steps": 4, "density": 0.2}
    whole = runs("whole", **options)
    ran = runs("cut", recipe=Recipe(before=fill), **options)
    assert ran.outcome.code == 0
    assert_same(ran.state, whole.state)
    off = sorted(
        line.getMessage().split(" is switched off")[0] for line in caplog.records if "off" in line.message
    )
    assert off == ["JSONLSink", "TensorBoardSink", "timing.csv", "train.log"]
    assert [line["step"] for line in ran.lines("train")] == [0, 1, 2]
    for path in ran.folder.glob("events.out.*"):
        path.unlink()  # it is a link to /dev/full
    longer = runs("cut", resume=True, **{**options, "max_epochs": 3})
    assert [line["step"] for line in longer.lines("train")] == [0, 1, 2, *range(14, 21)]


def test_a_result_on_a_full_disk_is_an_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, content)

    monkeypatch.setattr("oktopk.train.run_folder.write_atomically", full)
    assert "result.json" in runs("run", max_epochs=1).errors(OSError)[0]


def test_lines_that_no_run_has_written_do_not_stop_a_resume(tmp_path: Path) -> None:
    lines, table = tmp_path / "metrics.jsonl", tmp_path / "steps.csv"
    good = b'{"event":"step","step":1}\n'
    lines.write_bytes(
        good + b'{"event":' + b"[" * 200_000 + b"\n" + b'{"event":"step","step":' + b"9" * 5000 + b"}\n"
    )
    run_folder._rewind_lines(lines, 3)
    assert lines.read_bytes() == good
    table.write_bytes(b"step,loss\n1,2\n" + b"9" * 5000 + b",1\n")
    run_folder._rewind_table(table, 3)
    assert table.read_bytes() == b"step,loss\n1,2\n"
