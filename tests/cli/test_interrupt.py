"""Ctrl-C ends every command with one line, also before it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk.cli import COMMANDS

WAYS = {
    "oktopk": [str(Path(sys.executable).with_name("oktopk"))],
    "python -m oktopk": [sys.executable, "-m", "oktopk"],
}
SLOW = """
import signal
print("importing", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_during_the_imports_is_one_line(way: str, command: str, tmp_path: Path) -> None:
    """A torch that says that it is being imported, and then takes for ever, stands in for the real one."""
    (tmp_path / "torch.py").write_text(
        "import signal\nprint('importing', flush=True)\nwhile True: signal.pause()\n"
    )
    program = subprocess.Popen(
        [*WAYS[way], command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "importing\n"
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=100)
    assert (program.returncode, out, err) == (130, "", "interrupted\n")


def test_programs_that_use_the_library_keep_their_tracebacks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, oktopk\nassert sys.excepthook is sys.__excepthook__\n")
    subprocess.run([sys.executable, str(script)], check=True, timeout=100)
