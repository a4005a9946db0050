"""A short soak, and that it would tell: every figure can be missed."""

from __future__ import annotations

import copy
import gc
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stress.soak import run as soak
from tests.support import worlds

STEPS, SEED = 200, 39
"""With this seed, each rank has a number that is not finite once, in the first bucket or in the second."""


def short_soak(connect: Callable[..., Any]) -> dict[str, Any]:
    """One rank of it, as `job.main` has it do."""
    import logging

    import torch

    from stress.soak.job import soak

    torch.set_num_threads(1)
    gc.unfreeze()  # objects of before the fork are counted, too
    logging.getLogger("oktopk").setLevel(logging.ERROR)
    return asdict(soak(STEPS, SEED))


@pytest.mark.timeout(300)
def test_a_short_soak_is_as_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory need not be as flat as that of a long run: the density has only just come down."""
    monkeypatch.setitem(soak.GROWTH, "resident_bytes", 0.1)
    ranks = worlds.run("gloo", 3, short_soak, timeout=250)
    assert soak.misses(soak.measured(ranks)) == []
    for rank in ranks:
        assert rank["steps"] == STEPS
        assert rank["looks"] == 100
        assert rank["skipped"] == 3
        assert rank["partly_unused"] >= 15
        assert rank["unused"] >= 5
        assert rank["densest"] > 0.2
        assert rank["sparsest"] < 0.011


def made_up() -> list[dict[str, Any]]:
    """Of a run that went well."""
    held = {"resident_bytes": 500e6, "objects": 400_000, "files": 20, "threads": 2}
    memory = [{"step": step, **held} for step in range(1000, 20_001, 1000)]
    good = {"divergent": 0, "imbalance": 0.1, "wrongly_skipped": 0, "fewest": 0.8, "most": 1.2, "memory": memory}
    return [copy.deepcopy(good) for _ in range(3)]


DESCRIBED = {
    "steps": 20_000, "sparse_steps": 19_499, "seconds": 500.0, "densest": 0.25, "sparsest": 0.01, "skipped": 101,
    "partly_unused": 2680, "unused": 1308, "looks": 100,
}  # fmt: skip


@pytest.mark.parametrize("divergent", [0, 1])
def test_the_exit_code_tells(divergent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [rank | DESCRIBED | {"divergent": divergent} for rank in made_up()]
    monkeypatch.setattr(soak, "run_on_loopback", lambda *arguments, **options: json.dumps(ranks))
    monkeypatch.setattr(sys, "argv", ["run.py", "--json", str(tmp_path / "soak.json")])
    assert soak.main() == divergent
    written = json.loads((tmp_path / "soak.json").read_text())
    assert (len(written["records"]), len(written["misses"])) == (3, divergent)


def test_a_good_run_has_no_misses() -> None:
    ranks = made_up()
    for rank in ranks:
        rank["memory"][-1]["resident_bytes"] *= 1.019
    assert soak.misses(soak.measured(ranks)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("divergent", 1), ("imbalance", 1.01), ("imbalance", math.inf), ("wrongly_skipped", 1), ("fewest", 0.74),
        ("most", 1.26),
    ],
)  # fmt: skip
def test_a_miss_on_one_rank_is_told(name: str, value: float) -> None:
    ranks = made_up()
    ranks[1][name] = value
    assert len(soak.misses(soak.measured(ranks))) == 1


@pytest.mark.parametrize(
    ("name", "grown"), [("resident_bytes", 511e6), ("objects", 401_000), ("files", 21), ("threads", 3)]
)
def test_growth_on_one_rank_is_told(name: str, grown: float) -> None:
    """Also when it has shrunk again before the end."""
    ranks = made_up()
    ranks[2]["memory"][7][name] = grown
    (miss,) = soak.misses(soak.measured(ranks))
    assert name.replace("_", " ") in miss


def test_what_a_run_takes_before_it_has_settled_does_not_count() -> None:
    ranks = made_up()
    for rank in ranks:
        rank["memory"].insert(0, {**rank["memory"][0], "step": 500, "resident_bytes": 1e6})
    assert soak.misses(soak.measured(ranks)) == []
