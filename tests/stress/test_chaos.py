"""A bounded part of `make chaos`: every case ends with an error that says enough, or goes on correctly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oktopk.tools.lab import lab_problem
from stress.chaos import on_processes, on_threads
from stress.chaos.judging import ENDED, WENT_ON

BLOCK = 8


@pytest.mark.parametrize("first", range(0, 6 * BLOCK, BLOCK))
def test_cases_on_threads(first: int) -> None:
    for number in range(first, first + BLOCK):
        verdict = on_threads.examine(number)
        assert verdict.went in (ENDED, WENT_ON), verdict


@pytest.fixture(scope="module")
def _marked() -> Iterator[None]:
    with on_processes.marked():
        yield


PROCESS_CASES = [
    ("tcp", 9, "die"),
    ("ddp", 4, "corrupt"),
    ("relay", 2, "corrupt bytes"),
    ("ddp relay", 4, "missing bytes"),
    ("gloo relay", 5, "connection cut"),
    ("fork", 0, "die with a child"),
    ("fork", 5, "die with a loader"),
    ("lab", 3, "link down"),
]


@pytest.mark.usefixtures("_marked")
@pytest.mark.parametrize(("setting", "number", "kind"), PROCESS_CASES)
def test_cases_on_processes(setting: str, number: int, kind: str) -> None:
    if setting == "lab" and (problem := lab_problem()):
        pytest.skip(problem)
    verdict = on_processes.examine(number, [setting])
    assert verdict.kind == f"{setting}: {kind}"
    assert verdict.went == ENDED, verdict
