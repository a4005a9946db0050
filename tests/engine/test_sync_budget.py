"""How often the host waits for a GPU in a steady sparse step: counted on the real code, by file and line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton on this platform")

from oktopk.algorithms import OkTopkStatic
from oktopk.comm import ThreadCommunicator
from oktopk.comm.fixed import OverMessages
from tests.support.syncs import SCENES, count_waits, table

BUDGET = 12


@pytest.fixture(scope="module")
def found() -> list[Counter[str]]:
    return [count_waits(*scene) for scene in SCENES]


def test_the_host_path_keeps_its_budget(found: list[Counter[str]]) -> None:
    """At most 12 waits at P = 2 with 4 fused buckets, and 2 more for each further rank."""
    for (world, _, _), waits in zip(SCENES, found, strict=True):
        assert 0 < sum(waits.values()) <= BUDGET + 2 * (world - 2), "\n".join(map(str, sorted(waits.items())))


def test_the_documented_table_is_the_counted_one(found: list[Counter[str]]) -> None:
    shown, document = table(found), Path(__file__).parents[2] / "docs" / "cuda.md"
    assert shown in document.read_text(), f"docs/cuda.md must have this table:\n{shown}"


def test_a_step_without_the_host_has_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counter over the whole engine, on one rank."""
    monkeypatch.setattr(ThreadCommunicator, "device_collectives", lambda comm, device: OverMessages(comm))
    waits = count_waits(1, 4, "fp16", OkTopkStatic(resident=True))
    assert not waits, sorted(waits.items())
