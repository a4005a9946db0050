"""What a step costs as the model grows: the figures by records that were made up, and once on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load

NAME = "oktopk:fp16"
SMALL, LARGE = 25_000_000, 200_000_000
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("scale", monkeypatch)


def record(seconds: float, cpu: float, memory: float, sent: float | None = None) -> dict[str, Any]:
    figures = {"median_step_seconds": seconds, "cpu_seconds": cpu, "peak_memory_bytes": memory}
    return figures | {"sent_bytes": sent}


def found(size: int, bytes_above: float) -> dict[str, dict[str, Any]]:
    """Everything but the memory of ours is the same for all sizes."""
    return {
        "backward": record(0.1, 0.04, 1e9),
        "ddp": record(0.5, 0.2, 3e9),
        NAME: record(0.15, 0.07, 3e9 + bytes_above * size, 1.5e6),
    }


def run(scale: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> tuple[int, Any]:
    """The exit code and what was written."""
    monkeypatch.setattr(sys, "argv", ["scale.py", "--json", str(path), *words])
    return scale.main(), json.loads(path.read_text())


def test_a_row_has_what_ours_costs_above_the_others(scale: ModuleType) -> None:
    row = scale.row(SMALL, found(SMALL, 4.25), NAME)
    assert len(row) == len(scale.HEADERS)
    above_ns = 1e9 * 0.05 / SMALL
    expected = ["25,000,000", 100, 500, 150, 50, above_ns, 30, 1.5, "3,000", "3,106", 4.25]
    assert row == pytest.approx(expected)


def test_memory_grows_from_the_first_size_that_counts_to_the_largest(scale: ModuleType) -> None:
    above = {1_000_000: 90.0, LARGE: 5.0, 100_000_000: 70.0, SMALL: 8.0}
    of_sizes = {size: found(size, bytes_above) for size, bytes_above in above.items()}
    grows = scale.growth(of_sizes, NAME)
    assert grows == pytest.approx((5.0 * LARGE - 8.0 * SMALL) / (LARGE - SMALL))


@pytest.mark.parametrize("sizes", [[], [1_000_000], [LARGE], [1_000_000, LARGE]])
def test_one_size_alone_does_not_tell_how_memory_grows(scale: ModuleType, sizes: list[int]) -> None:
    assert scale.growth({size: found(size, 4.0) for size in sizes}, NAME) is None


@pytest.mark.parametrize(("bytes_above", "code"), [(4.39, 0), (4.41, 1)])
def test_too_much_memory_is_the_exit_code(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bytes_above: float, code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(scale, "measured", lambda size, options: found(size, bytes_above))
    exit_code, written = run(scale, monkeypatch, tmp_path / "scale.json", "--sizes", "1M", "25M", "200M")
    assert exit_code == code
    (verdict,) = written["verdicts"]
    assert verdict["found"] == pytest.approx(bytes_above)
    assert verdict["enough"] is (code == 0)
    assert f"grows by {bytes_above} bytes per parameter" in capsys.readouterr().out


@pytest.mark.timeout(1600)
@pytest.mark.usefixtures("forked_ranks")
def test_on_two_ranks(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sizes", "100k", "--steps", "3", "--timeout", str(PATIENCE)]
    code, written = run(scale, monkeypatch, tmp_path / "scale.json", *words)
    assert code == 0
    assert written["verdicts"][0]["enough"] is None
    names = ["backward", "ddp", NAME]
    assert [record["name"] for record in written["records"]] == names
    for record in written["records"]:
        assert (record["ranks"], record["steps"], record["model"]) == (2, 3, "pooled")
        assert 100_000 <= record["params"] < 110_000
        assert record["median_step_seconds"] > 0
        assert record["peak_memory_bytes"] > 1e8
    head, line = capsys.readouterr().out.splitlines()[:2]
    assert head.split() == " ".join(scale.HEADERS).split()
    cells = [float(cell.replace(",", "")) for cell in line.split()]
    size, (backward, ddp, ours, above) = cells[0], cells[1:5]
    told = [1e3 * record["median_step_seconds"] for record in written["records"]]
    assert (size, [backward, ddp, ours]) == (100_000, pytest.approx(told, rel=1e-3))
    assert above == pytest.approx(told[2] - told[0], rel=1e-3)
    sent = written["records"][2]["sent_bytes"]
    assert 0 < sent < 0.1 * 4 * size
