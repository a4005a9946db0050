"""Buckets are exchanged over a slow link while backward still computes."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import pytest

from oktopk.metrics.events import DENSE, SPARSE
from oktopk.tools.lab import Lab
from tests.support.jobs import overlap as overlap_job

HOSTS = 2
ALMOST = 0.75
"""The share of dense steps that must hide something: others use this machine too."""

TRIES = 6
pytestmark = [pytest.mark.timeout(800), pytest.mark.processes]  # all of them, on a machine that is busy

Step = dict[str, Any]


def undisturbed(lab: Lab) -> list[list[Step]]:
    """Of several runs the first that overlaps: other work takes overlap away, and never adds any."""
    for _ in range(TRIES):
        ranks = steps_of_ranks(lab)
        if all(hides(of_phase(steps, DENSE)) and overlaps(of_phase(steps, SPARSE)) for steps in ranks):
            break
    return ranks


def steps_of_ranks(lab: Lab, *options: str) -> list[list[Step]]:
    results = lab.run([sys.executable, overlap_job.__file__, *options], timeout=100)
    return [json.loads(rank.stdout) for rank in results]


def of_phase(steps: list[Step], phase: str) -> list[Step]:
    chosen = [step for step in steps if step["phase"] == phase]
    assert len(chosen) >= 4
    assert all(len(step["stops"]) == overlap_job.BUCKETS for step in chosen)
    return chosen


def overlaps(steps: list[Step]) -> bool:
    """Whether in every step the first buckets are exchanged while backward still runs, and it says so."""

    def overlapped(step: Step) -> bool:
        end_of_backward = min(step["at_first_layer"], step["handed_over"])
        return (
            all(stop < end_of_backward for stop in step["stops"][: overlap_job.FIRST]) and step["hidden_share"] > 0
        )

    return all(map(overlapped, steps))


def hides(steps: list[Step]) -> bool:
    """Whether almost every dense step says that it hides something; when a sum has ended only finish() sees."""
    return statistics.fmean(step["hidden_share"] > 0 for step in steps) >= ALMOST


def test_buckets_are_exchanged_during_backward_unless_held_back(buildable: None) -> None:
    """The check can fail: nothing is hidden when all buckets wait for the end of backward.

    Sparse ones: dense sums do not wait for the worker.
    """
    with Lab(HOSTS, rate="1gbit") as lab:
        usual, held = undisturbed(lab), steps_of_ranks(lab, "--hold")
    for rank in range(HOSTS):
        assert hides(of_phase(usual[rank], DENSE))
        assert overlaps(of_phase(usual[rank], SPARSE))
        steps = of_phase(held[rank], SPARSE)
        assert not overlaps(steps)
        assert all(min(step["stops"]) > step["handed_over"] for step in steps)
