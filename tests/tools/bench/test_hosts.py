"""Bench with several ranks on a host: what crosses the link, flat and by hosts."""

from __future__ import annotations

import json

import pytest

from oktopk.cli import main
from oktopk.tools.bench.names import parse_contender
from oktopk.tools.bench.plan import Plan
from oktopk.tools.lab import lab_problem

pytestmark = pytest.mark.timeout(600)
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""
SMALL = ["--model", "synthetic", "--params", "500001", "--density", "0.05", "--steps", "2", "--json"]


def test_ranks_must_fill_their_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--ranks", "3", "--ranks-per-host", "2"]) == 2
    assert "oktopk bench: error: --ranks 3 cannot be divided by --ranks-per-host 2" in capsys.readouterr().err
    assert main(["bench", "--ranks-per-host", "0"]) == 2


def test_ranks_are_told() -> None:
    plan = Plan((("ddp",),), 6, ranks_per_host=3)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_name_tells_of_hosts() -> None:
    one = parse_contender("oktopk:fp16:apart:hosts")
    assert one is not None
    assert (one.hosts, one.values, one.fusion_entries) == (True, "fp16", 0)


def test_on_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--ranks",
        "3",
        "--ranks-per-host",
        "3",
        "--contenders",
        "ddp,oktopk:hosts",
        "--timeout",
        str(PATIENCE),
    ]
    assert main(["bench", *words, *SMALL]) == 0
    ddp, hosts = json.loads(capsys.readouterr().out)["records"]
    assert (ddp["ranks_per_host"], hosts["ranks_per_host"]) == (3, 3)
    assert hosts["sent_bytes"] < 5000  # there is one host: nothing but words


def test_fewer_bytes_leave_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Flat, both ranks of a host send to both of the other; by hosts, only the leaders talk."""
    if problem := lab_problem():
        pytest.skip(problem)
    words = ["--ranks", "4", "--ranks-per-host", "2", "--link", "none", "--timeout", str(PATIENCE)]
    assert main(["bench", *words, "--contenders", "oktopk,oktopk:hosts", *SMALL]) == 0
    flat, hosts = json.loads(capsys.readouterr().out)["records"]
    assert 1.8 < flat["interface_bytes"] / hosts["interface_bytes"] < 2.5
    leaves = 2 * hosts["sent_bytes"]  # by the mean over both ranks of a host
    assert leaves < 1.1 * hosts["interface_bytes"]
    assert hosts["interface_bytes"] < 1.1 * leaves
