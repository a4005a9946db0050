"""The trainer with sinks, codecs and algorithms of a plug-in, and combinations of options that cannot be."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oktopk
from oktopk.metrics.sinks import SINKS
from oktopk.train.config.options import ConfigError
from tests.support.train.runs import Runs


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


class Counting:
    """A sink of somebody else."""

    def __init__(self, folder: Path) -> None:
        self.path, self.steps, self.closed = folder / "counted.json", 0, 0

    def emit(self, event: oktopk.StepEvent) -> None:
        self.steps += 1

    def close(self) -> None:
        self.closed += 1
        self.path.write_text(json.dumps([self.steps, self.closed]))


def test_further_sinks_are_opened_once_by_rank_0_and_closed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    monkeypatch.setitem(SINKS, "counting", lambda folder: opened.append(folder) or Counting(folder))
    ran = runs(world=2, max_steps=5, sinks="csv,counting,trace")
    assert ran.outcome.code == 0
    assert opened == [ran.folder]
    assert json.loads((ran.folder / "counted.json").read_text()) == [5, 1]
    with open(ran.folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = ran.lines("step")
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines] == list(range(5))
    assert [int(row["payload_bytes"]) for row in rows] == [line["payload_bytes"] for line in lines]
    assert len(json.loads((ran.folder / "trace.json").read_text())) > 5


def test_without_sinks_nothing_is_written_besides_the_usual(runs: Runs) -> None:
    names = {path.name for path in runs(max_steps=2).folder.iterdir()}
    assert not names & {"metrics.csv", "trace.json"}


def test_a_sink_that_cannot_be_opened_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> Any:
        raise RuntimeError("no server at this address")

    monkeypatch.setitem(SINKS, "remote", fail)
    ran = runs(world=2, max_steps=2, sinks="remote")
    said = "--sinks: 'remote' cannot be opened: RuntimeError: no server at this address"
    assert ran.errors(ConfigError) == [said, f"on rank 0: {said}"]


class Rounded(oktopk.ValueCodec):
    """Signed bytes of values over the largest."""

    name, number, width = "rounded", 150, 1

    def encode(self, values: Any) -> tuple[Any, float]:
        largest = np.abs(values).max(initial=np.float32(1e-30))
        return np.rint(values / largest * 100).astype(np.int8).view(np.uint8), float(largest)

    def decode(self, stream: Any, scale: float) -> Any:
        return stream.view(np.int8).astype(np.float32) / np.float32(100) * np.float32(scale)


def test_a_run_with_a_codec_resumes_to_the_bit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals hold its rounding errors, and the checkpoint holds residuals."""
    monkeypatch.setitem(oktopk.VALUES, "rounded", Rounded())
    options = {"values": "rounded", "density": 0.3, "warmup_steps": 2, "world": 2}
    whole = runs("whole", max_steps=9, **options)
    runs("parts", max_steps=5, **options)
    parts = runs("parts", max_steps=9, resume=True, **options)
    losses = [[line["loss"] for line in ran.lines("train")] for ran in (whole, parts)]
    assert len(losses[0]) == 9
    assert losses[0] == losses[1]
    coarse = [line["loss"] for line in runs("fp32", max_steps=9, **{**options, "values": "fp32"}).lines("train")]
    assert coarse[:3] == losses[0][:3]  # dense steps, and the first sparse one has not been applied
    assert coarse != losses[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks_per_host": 2, "world": 3}, "--ranks-per-host is 2, but the number of ranks, 3, is no multiple"),
        (
            {"momentum_correction": True, "momentum": 1.0},
            "--momentum-correction needs a --momentum below 1, got 1",
        ),
    ],
)
def test_what_cannot_be_combined_is_said_before_the_folder_is_made(
    runs: Runs, options: dict[str, Any], said: str
) -> None:
    ran = runs(max_steps=2, **options)
    assert all(said in text for text in ran.errors(ConfigError))
    assert not ran.folder.exists()
