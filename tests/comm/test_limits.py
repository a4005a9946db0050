"""Many ranks need many files: the limit is raised, or the error says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, resource, sys
from oktopk.comm.process_group.limits import raise_file_limit
for case in sys.argv[1:]:
    soft, hard, connections = map(int, case.split())
    if os.fork():
        os.wait()
        continue
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        raise_file_limit(connections)
        print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)
"""


def limits(*cases: str) -> list[str]:
    """What each case of "soft hard connections" leads to, in a child of one process that has imported torch."""
    command = [sys.executable, "-c", CODE, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_the_limit_on_open_files_is_raised_where_it_must() -> None:
    enough, raised, low, lowest = limits("400 800 10", "200 800 300", "200 300 400", "300 300 400")
    assert enough == "(400, 800)"
    assert raised == "(800, 800)"
    assert "CommError: this rank needs about" in low
    assert "but may open 300: raise the limit" in lowest
