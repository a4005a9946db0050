"""Run by the Python of an environment that has the wheel: `python installed.py minimal|full RANKS`.

First without extras, then in the same environment with them. An installation has no pytest to run tests by.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import torch

import oktopk
from oktopk.metrics.sinks import TensorBoardSink

SECONDS = 300
"""For one command: Numba compiles the kernels when they are first used, and the machine may be busy."""
BY_EXTRA = {
    "mpi": ["mpi4py"],
    "train": ["PIL", "jiwer", "soundfile", "tensorboard", "tqdm", "transformers"],
    "report": ["matplotlib", "pandas", "plotly", "tqdm"],
}
COMMANDS = ("train", "sweep", "report", "bench", "simulate", "doctor", "data", "jobscript")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("oktopk")
    return subprocess.run([str(program), *words], capture_output=True, text=True, timeout=SECONDS, check=False)


def said(*words: str) -> str:
    """What a command says that must succeed."""
    done = command(*words)
    assert done.returncode == 0, f"oktopk {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def complaint(*words: str) -> str:
    """What a command says that must fail, in one line."""
    done = command(*words)
    assert done.returncode == 1, f"oktopk {' '.join(words)}\n{done.stdout}{done.stderr}"
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def refusal(make: Callable[[], object]) -> str:
    """The error that something ends with."""
    try:
        make()
    except (ImportError, oktopk.OkTopkError) as error:
        return str(error)
    return "nothing was missing"


def is_installed() -> None:
    """Nothing of it comes from a source tree."""
    home = Path(oktopk.__file__).resolve()
    assert Path(sys.prefix).resolve() in home.parents, home
    assert metadata.version("oktopk") == oktopk.__version__


def reduces() -> None:
    """Three ranks as threads, and no mass is lost."""

    def rank(comm: oktopk.Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank))
        residual = torch.zeros(1001)
        mean, _ = oktopk.sparse_allreduce(gradient, 0.05, residual=residual, comm=comm)
        return gradient, residual, mean

    gradients, residuals, means = (torch.stack(parts) for parts in zip(*oktopk.run_threads(3, rank), strict=True))
    assert 40 <= int(means[0].count_nonzero()) <= 62
    assert all(torch.equal(mean, means[0]) for mean in means)
    torch.testing.assert_close(gradients.sum(0), residuals.sum(0) + 3 * means[0])


def explains_itself() -> None:
    text = said("--help")
    assert all(f"\n    {name}" in text for name in COMMANDS), text
    assert isinstance(json.loads(said("doctor", "--json")), dict)


def names_what_is_missing() -> None:
    """Without extras: what is not there, and how to get it."""
    present = [name for names in BY_EXTRA.values() for name in names if util.find_spec(name)]
    assert not present, f"more than the library asks for: {present}"
    assert "pip install 'oktopk[train]'" in complaint("train", "--help")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("")
    assert "pip install 'oktopk[report]'" in complaint("report", "run", "-o", "page.html")
    assert "pip install 'oktopk[mpi]'" in refusal(oktopk.MPICommunicator)
    assert "pip install 'oktopk[train]'" in refusal(lambda: TensorBoardSink("events"))


def trains_and_reports(ranks: str) -> None:
    """With extras: embedded data, shipped configurations, and the files of the report's page."""
    missing = [name for names in BY_EXTRA.values() for name in names if util.find_spec(name) is None]
    assert not missing, f"the extras do not bring {missing}"
    said("train", "--config", "demo", "--max-steps", "3", "--warmup-steps", "1", "--ranks", ranks, "--out", "run")
    said("report", "run", "-o", "page.html")
    assert "<style>" in Path("page.html").read_text(encoding="utf-8")


def main(kind: str, ranks: str) -> None:
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        del os.environ[name]  # commands must not find the source tree
    os.environ["OMP_NUM_THREADS"] = "1"
    is_installed()
    if kind == "full":
        trains_and_reports(ranks)
    else:
        reduces()
        explains_itself()
        names_what_is_missing()
    print(f"{kind} installation of oktopk {oktopk.__version__}: all as it must be")


if __name__ == "__main__":
    main(*sys.argv[1:])
