"""Bench in the lab: what was metered is what the kernel has counted, and nothing is left of an interrupted run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from oktopk.cli import main
from oktopk.tools.lab import lab_problem
from tests.support.machine import children, heeded, spaces_of
from tests.support.worlds import is_running, wait_until

pytestmark = pytest.mark.timeout(600)
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""
OVERHEAD = 0.05
"""Of TCP/IP: headers of what is sent, acknowledgements of what is received, and a barrier before and after."""


@pytest.fixture(autouse=True, scope="module")
def _buildable() -> None:
    if problem := lab_problem():
        pytest.skip(problem)


def test_metered_bytes_are_those_of_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    size, ranks = 1_000_003, 3
    sizes = ["--params", str(size), "--density", "0.05", "--steps", "2"]
    words = ["--json", "--model", "synthetic", *sizes, "--timeout", str(PATIENCE)]
    names = "backward,ddp,dense,topka,oktopk"
    assert main(["bench", "--ranks", str(ranks), "--link", "none", "--contenders", names, *words]) == 0
    found = {record["name"]: record for record in json.loads(capsys.readouterr().out)["records"]}
    for name in ("topka", "oktopk"):
        metered, counted = found[name]["sent_bytes"], found[name]["interface_bytes"]
        assert found[name]["sent_bytes_source"] == "metered"
        assert metered < counted < (1 + OVERHEAD) * metered, name
    ring = 2 * (ranks - 1) / ranks * 4 * size
    for name, source in (("ddp", "interface"), ("dense", "modelled")):
        assert found[name]["sent_bytes_source"] == source
        assert ring < found[name]["interface_bytes"] < (1 + OVERHEAD) * ring
    assert found["dense"]["sent_bytes"] == pytest.approx(ring, rel=1e-3)
    assert found["backward"]["interface_bytes"] < 1e4
    assert {record["link"] for record in found.values()} == {"none"}


def test_interrupting_leaves_nothing() -> None:
    command = [sys.executable, "-m", "oktopk", "bench", "--ranks", "3", "--link", "none,1gbit", "--model", "mlp"]
    with heeded(signal.SIGINT):
        bench = subprocess.Popen([*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        # lab_problem() builds a lab of one host before
        assert wait_until(lambda: len(spaces_of(bench.pid)) == 4 and len(children(bench.pid)) >= 3, PATIENCE)
        ranks = children(bench.pid)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=PATIENCE)
    finally:
        bench.kill()
    assert bench.returncode == 130
    assert spaces_of(bench.pid) == []
    assert not any(map(is_running, ranks))
    assert out == b""
    assert b"Traceback" not in err
