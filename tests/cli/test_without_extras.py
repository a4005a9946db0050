"""Commands that need no further packages do without them, and the others say what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oktopk.utils.extras import install_command

WITHOUT = """
import sys

MISSING = {"PIL", "jiwer", "matplotlib", "plotly", "soundfile", "tensorboard", "tqdm", "transformers"}


class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Without())
import contextlib, io, json
from oktopk.cli import main

found = []
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words.split())
        except SystemExit as end:
            code = end.code
    found.append([code, err.getvalue()])
print(json.dumps(found))
"""
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""
pytestmark = pytest.mark.timeout(PATIENCE + 100)


def oktopk(folder: Path, *commands: str) -> dict[str, list[Any]]:
    """The exit code and the error of each command, in one process."""
    program = [sys.executable, "-c", WITHOUT, *commands]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, cwd=folder, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(zip(commands, json.loads(done.stdout), strict=True))


def test_the_library_alone_is_enough(tmp_path: Path) -> None:
    simulate = "simulate --ranks 2 --params 20k --algorithms dense"
    found = oktopk(tmp_path, "--help", "doctor", "bench --help", simulate)
    assert found == {words: [0, ""] for words in found}


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, found in oktopk(tmp_path, "train --help", "sweep --help", "data --help").items():
        how = install_command("train")
        assert found == [1, f"oktopk {words.split()[0]}: error: the package tqdm is not installed: {how}\n"]
