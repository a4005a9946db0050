"""A rank is killed, torchrun starts all of them again, and training goes on as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import worlds
from tests.support.jobs import restart as restart_job

P, DIE_AT, RESUME_AT = 3, 12, 10
pytestmark = pytest.mark.timeout(240)  # three starts of torch on three ranks, on a machine that may be busy


# Otherwise torch's own groups of the second life meet the addresses that the first has left in torchrun's store.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(directory: Path, *arguments: str) -> str:
    """What it says, when it ends well; no process of it is left in any case."""
    options = ["--standalone", "--nproc-per-node", str(P), "--max-restarts", "1", "--monitor-interval", "0.1"]
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, restart_job.__file__, directory, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | ENVIRONMENT,
        text=True,
    ) as job:
        try:
            output, _ = job.communicate(timeout=120)
        finally:
            job.terminate()  # then it ends its ranks
    assert job.returncode == 0, output
    return output


def undisturbed_rank(connect: object, directory: Path) -> None:
    restart_job.train(directory, die_at=None)


def runs(folder: Path) -> tuple[Path, Path]:
    """The directories of a run in which a rank is killed, and of an undisturbed one."""
    killed, undisturbed = folder / "killed", folder / "undisturbed"
    killed.mkdir()
    undisturbed.mkdir()
    output = torchrun(killed, "--die-at", str(DIE_AT))
    assert "exitcode: -9" in output  # torchrun says why it has started all ranks again
    worlds.run("gloo", P, undisturbed_rank, undisturbed)
    return killed, undisturbed


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """To the bit, in whatever they are nested."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    else:
        assert one == other or (one != one and other != other), where


def test_a_restarted_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    killed, undisturbed = runs(tmp_path)
    for rank in range(P):
        saved = load(restart_job.checkpoint(killed, rank, RESUME_AT))["oktopk"]
        resumed = load(killed / f"resumed-rank{rank}.pt")
        assert resumed["step"] == resumed["oktopk"]["step"] == RESUME_AT
        assert_same(resumed["oktopk"], saved)
        assert all(residual.count_nonzero() for residual in resumed["oktopk"]["residuals"].values())
        assert len(resumed["oktopk"]["buckets"]) > 1
    assert not list(undisturbed.glob("resumed-*"))

    ends = [(load(killed / f"final-rank{r}.pt"), load(undisturbed / f"final-rank{r}.pt")) for r in range(P)]
    for end, expected in ends:
        assert_same(end, expected)
        assert_same(end["model"], ends[0][0]["model"])
    assert ends[0][0]["oktopk"]["step"] == restart_job.STEPS
