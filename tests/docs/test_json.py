"""docs/json.md has the schema and the keys of what every command prints with --json, no more and no fewer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli.commands import bench, data, doctor
from oktopk.tools import simulate, sweep
from oktopk.tools.doctor import World
from oktopk.tools.race.spec import Race
from oktopk.tools.race.summary import build_summary
from oktopk.tools.report import build_report, read_run
from oktopk.train.data.images.cifar import ImportSummary as Images
from oktopk.train.data.speech.an4 import ImportSummary, SplitSummary
from oktopk.utils.schemas import SCHEMAS, add_schema
from tests.support.paths import ROOT
from tests.support.report_runs import write_run
from tests.support.train.runs import Runs

PAGE = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")


def documented() -> dict[str, list[str]]:
    """The keys in the first column of each section's table."""
    sections = re.split(r"^## oktopk\.", PAGE, flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        name, _, text = section.partition("\n")
        rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        found[name] = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    return found


def test_every_schema_has_a_section() -> None:
    assert list(documented()) == list(SCHEMAS)
    assert all(version >= 1 for version in SCHEMAS.values())


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _sweep(tmp_path: Path, capsys: Any) -> Any:
    return sweep.report([sweep.Outcome(sweep.Run("dense", None, 0))])


def _report(tmp_path: Path, capsys: Any) -> Any:
    return build_report([read_run(write_run(tmp_path / "run", steps=3, warmup=1), "run")])


def _bench(tmp_path: Path, capsys: Any) -> Any:
    class Options:
        json, figure = True, None

    assert bench._show(Options, [{}]) == 0  # type: ignore[arg-type]
    return printed(capsys)


def _race(tmp_path: Path, capsys: Any) -> Any:
    return build_summary(Race({"dnn": "x"}), [])


def _simulate(tmp_path: Path, capsys: Any) -> Any:
    question = simulate.Question([2], [], 1000, 0.1, simulate.Network(1e-3, 1e6, 1e-6))
    return simulate.report(question, simulate.Costs(1000, 1, {}, {}, simulate.Prices()), [], "given")


def _doctor(tmp_path: Path, capsys: Any) -> Any:
    return doctor._to_json(World(({},)), [])


def _data(action: str, row: dict[str, Any]) -> Callable[[Path, Any], Any]:
    def run(tmp_path: Path, capsys: Any) -> Any:
        data._print_json(action, row)
        return printed(capsys)

    return run


SPLIT = SplitSummary(Path("m.csv"), 3, 2, 1, 2.0)
DOCUMENTS: dict[str, Callable[[Path, Any], Any]] = {
    "sweep": _sweep,
    "report": _report,
    "bench": _bench,
    "race": _race,
    "simulate": _simulate,
    "doctor": _doctor,
    "data.an4": _data("an4", asdict(ImportSummary(SPLIT, SPLIT, ()))),
    "data.cifar10": _data("cifar10", asdict(Images(Path("f"), 1, 1, ()))),
    "data.fix-manifest": _data("fix-manifest", {"manifests": []}),
    "data.check": _data("check", {"manifests": [], "problems": []}),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_keys_are_those_of_the_page(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = DOCUMENTS[name](tmp_path, capsys)
    assert next(iter(found)) == "schema"
    assert found.pop("schema") == {"name": f"oktopk.{name}", "version": SCHEMAS[name]}
    assert sorted(found) == sorted(documented()[name])


def test_so_are_those_of_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Runs(tmp_path, monkeypatch)(max_steps=2).outcome.result
    found = add_schema("train", {"folder": "x", **result})
    assert sorted(found) == sorted(["schema", *documented()["train"]])
