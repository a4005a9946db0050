"""Runs examples, alone and on several ranks, and reads what they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.forked import run_program
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
SECONDS = 200
"""For one run: most take about six, half of it imports; but a busy machine is not a bug."""


class Summary(NamedTuple):
    """What an example prints at its end."""

    ranks: int
    accuracy: float
    dense: int
    sparse: int
    skipped: int
    sent: dict[str, float]
    """Kilobytes per step, by phase."""
    ratio: float


def run(name: str, *options: object, ranks: int | None = None) -> str:
    """The output of an example: alone, or started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    # A session of its own: with the launcher, its ranks end too.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def run_forked(name: str, *options: object, ranks: int | None = None) -> str:
    """The same, where the interpreter's start is of no interest."""
    return run_program(EXAMPLES / f"{name}.py", list(map(str, options)), ranks, SECONDS)


def parse(text: str) -> Summary:
    def find(pattern: str) -> list[str]:
        match = re.search(pattern, text, re.MULTILINE)
        assert match, text
        return list(match.groups())

    dense, sparse, skipped = map(int, find(r"^steps +(\d+) dense, (\d+) sparse, (\d+) of them skipped$"))
    sent = {phase: float(size) for size, phase in re.findall(r"([\d.]+) kB in a (dense|sparse) step", text)}
    (ranks,), (accuracy,) = find(r"^ranks +(\d+)$"), find(r"^accuracy +([\d.]+) %")
    return Summary(
        int(ranks), float(accuracy), dense, sparse, skipped, sent, float(find(r"^compression +(\d+)")[0])
    )


def check(summary: Summary, ranks: int, steps: tuple[int, int], accuracy: float, ratio: int = 100) -> None:
    """`ratio` is 1 / density."""
    assert (summary.ranks, summary.dense, summary.sparse) == (ranks, *steps)
    assert summary.accuracy >= accuracy
    assert 0.6 * ratio < summary.ratio < 1.5 * ratio
    if ranks == 1:
        assert not summary.sent
    elif summary.dense:
        assert 0 < summary.sent["sparse"] < 0.1 * summary.sent["dense"]


def states(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """What oktopk keeps, of all ranks."""
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob(pattern))]
