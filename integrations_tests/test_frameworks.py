"""The examples with frameworks: they learn by sparse steps, and resume every rank to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.examples import SECONDS, Summary, check, parse, run, states
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(6 * SECONDS)
STEPS, MORE = 60, 10
"""Of a run, and of the one that resumes it."""


class Framework(NamedTuple):
    accuracy: float
    """The least, in percent, after the first of two runs; guessing gives 10."""
    weights: str
    """The file of a checkpoint that has the model."""


FRAMEWORKS = {
    "accelerate": Framework(60, "model.safetensors"),
    "huggingface_trainer": Framework(40, f"checkpoint-{STEPS + MORE}/model.safetensors"),
    "lightning": Framework(60, "model.ckpt"),
    "ray_train": Framework(60, "model.pt"),
}

ANY_RANKS = ("accelerate", "ray_train")
"""One that is started by torchrun and one that starts its workers stand for all."""


def train(name: str, steps: int, out: Path, *more: str, ranks: int = 2) -> Summary:
    words = ["--steps", steps, "--density", 0.05, "--out", out, *more]
    if name == "ray_train":  # starts its own workers, and resumes by itself
        resumed = [word for word in words if word != "--resume"]
        return parse(run(name, *resumed, "--ranks", ranks))
    return parse(run(name, *words, ranks=ranks))


def newest(name: str, out: Path) -> Path:
    """The folder of the last checkpoint."""
    if name == "ray_train":
        return max(file.parent for file in (out / "digits").glob("checkpoint_*/model.pt"))
    return (out / FRAMEWORKS[name].weights).parent


def weights(name: str, out: Path) -> dict[str, torch.Tensor]:
    file = newest(name, out) / Path(FRAMEWORKS[name].weights).name
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    saved: dict[str, Any] = torch.load(file, weights_only=False)
    found: dict[str, torch.Tensor] = saved["state_dict" if name == "lightning" else "model"]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_run_that_was_resumed_has_the_bits_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    """Its second part needs no warm-up, either: it goes on counting."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    accuracy = FRAMEWORKS[name].accuracy
    check(train(name, STEPS, parts), 2, (20, STEPS - 20), accuracy, ratio=20)
    check(train(name, MORE, parts, "--resume"), 2, (0, MORE), accuracy, ratio=20)
    check(train(name, STEPS + MORE, whole), 2, (20, STEPS + MORE - 20), accuracy, ratio=20)

    resumed, straight = (states(newest(name, out), "*oktopk-rank*.pt") for out in (parts, whole))
    assert len(resumed) == 2
    for rank, (one, other) in enumerate(zip(resumed, straight, strict=True)):
        assert (one["rank"], one["world"], one["step"]) == (rank, 2, STEPS + MORE)
        assert any(kept.count_nonzero() for kept in one["residuals"].values())
        assert same(one, other), f"rank {rank}: another state"
    assert not same(resumed[0]["residuals"], resumed[1]["residuals"])
    assert same(weights(name, parts), weights(name, whole))
    if name in ANY_RANKS:
        resume_on_three_ranks(name, parts)


def resume_on_three_ranks(name: str, out: Path) -> None:
    """They share what two have kept. Part of the test above, because frameworks start slowly."""
    check(train(name, 5, out, "--resume", ranks=3), 3, (0, 5), accuracy=10, ratio=20)
    saved = states(newest(name, out), "*oktopk-rank*.pt")
    found = [(state["rank"], state["world"], state["step"]) for state in saved]
    assert found == [(rank, 3, STEPS + MORE + 5) for rank in range(3)]


def test_alone() -> None:
    """One stands for all, because they start slowly."""
    out = run("accelerate", "--steps", 20, "--warmup-steps", 5, "--density", 0.05)
    check(parse(out), 1, (5, 15), accuracy=10, ratio=20)


@pytest.mark.parametrize("job", ["lightning_checkpoints", "only_process"])
def test_a_process_of_its_own(job: str, tmp_path: Path) -> None:
    """See there."""
    command = [sys.executable, "-m", "integrations_tests.jobs", job, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["as it must be"]), done.stdout + done.stderr
