"""Commands that need no further packages do without them, and the others say what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

MISSING = {"PIL", "jiwer", "matplotlib", "plotly", "soundfile", "tensorboard", "tqdm", "transformers"}


class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Without())
from oktopk.cli import main

sys.exit(main(sys.argv[1:]))
"""
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""
pytestmark = pytest.mark.timeout(PATIENCE + 100)


def oktopk(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder, check=False)


@pytest.mark.parametrize(
    "words", ["--help", "doctor", "bench --help", "simulate --ranks 2 --params 20k --algorithms dense"]
)
def test_the_library_alone_is_enough(words: str, tmp_path: Path) -> None:
    done = oktopk(tmp_path, *words.split())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["train", "sweep", "data"])
def test_what_is_missing_is_named(command: str, tmp_path: Path) -> None:
    done = oktopk(tmp_path, command, "--help")
    missing = f"oktopk {command}: error: the package tqdm is not installed: pip install 'oktopk[train]'\n"
    assert (done.returncode, done.stderr) == (1, missing)
