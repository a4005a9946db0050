"""Buckets are exchanged over a slow link while backward still computes."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import overlap_job
import pytest

from oktopk.metrics import DENSE, SPARSE
from oktopk.tools.lab import Lab

HOSTS = 2
MOST = 0.5
"""The share of steps in which that must be so: others use this machine too. With the worker held back it is 0."""

Step = dict[str, Any]


@pytest.fixture(scope="module")
def runs(buildable: None) -> dict[str, list[list[Step]]]:
    """The steps of every rank, as usual and with the worker held back."""
    commands = {"usual": [], "held": ["--hold"]}
    with Lab(HOSTS, rate="1gbit") as lab:
        results = {
            name: lab.run([sys.executable, overlap_job.__file__, *more], timeout=100)
            for name, more in commands.items()
        }
    return {name: [json.loads(rank.stdout) for rank in ranks] for name, ranks in results.items()}


def of_phase(steps: list[Step], phase: str) -> list[Step]:
    chosen = [step for step in steps if step["phase"] == phase]
    assert len(chosen) >= 4
    assert all(len(step["stops"]) == overlap_job.BUCKETS for step in chosen)
    return chosen


def overlaps(steps: list[Step]) -> bool:
    """Whether in most steps the first of ten buckets is through before backward reaches the last layer it has to
    do, and the step says so."""

    def overlapped(step: Step) -> bool:
        end_of_backward = min(step["at_first_layer"], step["handed_over"])
        return bool(step["stops"][0] < end_of_backward and step["hidden_share"] > 0)

    return statistics.fmean(map(overlapped, steps)) >= MOST


@pytest.mark.parametrize("rank", range(HOSTS))
@pytest.mark.parametrize("phase", [DENSE, SPARSE])
def test_the_first_bucket_is_exchanged_during_backward(
    runs: dict[str, list[list[Step]]], phase: str, rank: int
) -> None:
    assert overlaps(of_phase(runs["usual"][rank], phase))


@pytest.mark.parametrize("rank", range(HOSTS))
@pytest.mark.parametrize("phase", [DENSE, SPARSE])
def test_a_worker_that_is_held_back_does_not_overlap(
    runs: dict[str, list[list[Step]]], phase: str, rank: int
) -> None:
    """The check above can fail: nothing is hidden when all buckets wait for the end of backward."""
    steps = of_phase(runs["held"][rank], phase)
    assert not overlaps(steps)
    assert all(min(step["stops"]) > step["handed_over"] for step in steps)
