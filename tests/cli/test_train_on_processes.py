"""The user's own commands, as they type them, in their own processes: alone, by mpirun, by torchrun, by --ranks.

Recordings are written from the embedded speech: what matters here is how runs begin and end.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oktopk.train.data.speech.audio import write_samples
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, write_manifest
from oktopk.train.data.speech.synthetic import generate
from tests.support.forked import run_command
from tests.support.paths import ROOT

SECONDS = 240
pytestmark = pytest.mark.timeout(2 * SECONDS)
USER = (
    "--dnn lstman4 --dataset an4 --data_dir ./audio_data --nworkers {ranks} --max_epochs 1 --batch_size 8 "
    "--lr 0.01 --compression True --compressor oktopk"
)
SMALL = "--dnn lstman4-small --data-dir ./audio_data --batch-size 2 --lr 0.001"
OKTOPK = [sys.executable, "-m", "oktopk", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "-np", "2", sys.executable]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with audio_data: 16 utterances to train with, 3 to validate with."""
    folder = tmp_path_factory.mktemp("user")
    corpus = generate(train=16, val=3)
    for name, clips in ((TRAIN_MANIFEST, corpus.train), (VAL_MANIFEST, corpus.val)):
        pairs = []
        for clip in clips:
            sound, text = (folder / "audio_data" / f"{clip.name}.{end}" for end in ("wav", "txt"))
            write_samples(sound, clip.samples)
            text.write_text(clip.text)
            pairs.append((sound, text))
        write_manifest(folder / "audio_data" / name, pairs)
    return folder


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(command: list[str], folder: Path, code: int = 0) -> str:
    with started(command, folder) as process:
        out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == code, out
        return out


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "result.json").read_text())  # type: ignore[no-any-return]


def steps(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == "step"]


def check(folder: Path, name: str, dense: int, sparse: int) -> None:
    """Metrics for every step, a finite loss, a real validation."""
    ended = result(folder, name)
    assert ended["finished"]
    found = steps(folder, name)
    assert [row["phase"] for row in found] == ["dense"] * dense + ["sparse"] * sparse
    assert all(math.isfinite(row["loss"]) for row in ended["phases"].values())
    last = ended["validations"][-1]
    assert all(math.isfinite(last[figure]) for figure in ("val loss", "val WER", "val CER"))
    assert last["val loss"] > 0


def test_item_19_the_users_own_command_alone(folder: Path) -> None:
    """With one more option, so that its second step is sparse: the folder holds few recordings."""
    words = f"{USER.format(ranks=1)} --warmup_steps 1 --out own".split()
    out = run([sys.executable, str(ROOT / "main_trainer.py"), *words], folder)
    check(folder, "own", dense=1, sparse=1)
    dense, sparse = steps(folder, "own")
    assert (dense["payload_bytes"], dense["sparsity"], dense["compression_ratio"]) == (110_278_272, 0.0, 1.0)
    assert sparse["payload_bytes"] == 8 * sparse["count"]
    assert sparse["sparsity"] == pytest.approx(0.99, abs=0.003)
    assert "27,569,568 parameters" in out
    assert "2 steps: 1 dense warm-up, 1 sparse; sparse starts in epoch 0" in out
    assert "val WER" in out
    assert "val acc" not in out
    assert "nan" not in out.lower().split()


@pytest.mark.parametrize(
    ("launcher", "name"), [(MPIRUN, "mpirun"), (TORCHRUN, "torchrun")], ids=["mpirun", "torchrun"]
)
def test_items_19_and_20_two_ranks(launcher: list[str], name: str, folder: Path) -> None:
    words = f"{USER.format(ranks=2)} --dnn lstman4-small --batch_size 2 --warmup_steps 3 --out {name}".split()
    run([*launcher, str(ROOT / "main_trainer.py"), *words], folder)
    check(folder, name, dense=3, sparse=1)
    assert result(folder, name)["world"] == 2


def test_item_19_a_wrong_number_of_workers_is_an_error_everywhere(folder: Path) -> None:
    program = str(ROOT / "main_trainer.py")
    for command in ([*MPIRUN, program], [sys.executable, program]):
        with started([*command, *f"{SMALL} --nworkers 3 --out wrong".split()], folder) as process:
            out, _ = process.communicate(timeout=SECONDS)
            assert process.returncode != 0
            assert "--nworkers is 3, but there" in out
            assert "Traceback" not in out
    assert not (folder / "wrong").exists()


def test_item_21_what_one_rank_finds_is_said_and_ends_all_under_mpirun(folder: Path) -> None:
    """Data that only one rank misses, and data that all miss."""
    program = [*MPIRUN, str(ROOT / "main_trainer.py"), *SMALL.split(), "--out", "bad"]
    for words in (["--data-dir", "nowhere"], ["--pretrain", "nothing.pt"]):
        with started([*program, *words], folder) as process:
            out, _ = process.communicate(timeout=SECONDS)
            assert process.returncode != 0
            assert words[1] in out
            assert "Traceback" not in out


def test_sigterm_saves_and_resume_goes_on_to_the_same_end(folder: Path) -> None:
    """Item 4 and 5 of the issue: all ranks end together after a step, with a checkpoint; nothing is lost.

    What it is compared with is not typed, but forked.
    """
    train = [*OKTOPK, *SMALL.split(), "--max-epochs", "6", "--warmup-steps", "3"]
    whole = [*train, "--ranks", "2"]
    done = run_command([*whole, "--out", "whole"], folder, os.environ | {"OMP_NUM_THREADS": "1"}, SECONDS)
    assert done.returncode == 0, done.stderr
    with started([*whole, "--out", "cut"], folder) as process:
        wait_for_a_checkpoint(folder / "cut")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 128 + signal.SIGTERM, out
        assert "--resume cut" in out
    assert not result(folder, "cut")["finished"]
    run([*OKTOPK, "--resume", "cut"], folder)
    check(folder, "whole", dense=3, sparse=21)
    ended, other = result(folder, "cut"), result(folder, "whole")
    assert ended["validations"] == other["validations"]
    assert ended["steps"] == other["steps"]


def test_item_21_a_rank_that_is_killed_ends_all(folder: Path) -> None:
    command = [*OKTOPK, *SMALL.split(), "--ranks", "2"]
    with started([*command, "--max-epochs", "5000", "--out", "killed", "--timeout", "60"], folder) as process:
        wait_for_a_checkpoint(folder / "killed")
        os.kill(_children(process.pid)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode not in (0, None), out
    assert not (folder / "killed" / "result.json").exists()


def wait_for_a_checkpoint(run: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not list(run.glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
