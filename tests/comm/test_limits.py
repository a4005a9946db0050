"""Many ranks need many files: the limit is raised, or the error says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
from oktopk.comm.process_group.limits import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_file_limit({connections})
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits(soft: int, hard: int, connections: int) -> str:
    code = CODE.format(soft=soft, hard=hard, connections=connections)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_the_limit_on_open_files_is_raised_where_it_must() -> None:
    assert limits(400, 800, 10) == "(400, 800)"
    assert limits(200, 800, 300) == "(800, 800)"
    assert "CommError: this rank needs about" in limits(200, 300, 400)
    assert "but may open 300: raise the limit" in limits(300, 300, 400)
