"""A report as a picture and as CSV files, with the page's numbers; the terminal says what is missing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from oktopk.cli import main
from oktopk.tools.report import build_report, draw, read_run, write_tables
from oktopk.tools.report.html.charts import make_charts
from oktopk.tools.report.html.comparison import make_comparison
from tests.support.report_runs import write_run


def document(tmp_path: Path, *names: str, **options: Any) -> dict[str, Any]:
    return build_report([read_run(write_run(tmp_path / name, **options), name) for name in names])


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_chart_is_a_table_with_its_points(tmp_path: Path) -> None:
    known = document(tmp_path, "run", steps=12, warmup=4, skipped={7: "rank 0: w"})
    paths = write_tables(known, tmp_path / "csv")
    charts = make_charts(known["runs"][0])
    assert [path.name for path in paths] == [f"{chart.name}.csv" for chart in charts]
    assert len(charts) >= 8
    series = known["runs"][0]["series"]
    sent = [row for row in rows(tmp_path / "csv" / "bytes.csv") if row["series"] == "sent by rank 0"]
    assert [float(row["bytes per step (B)"]) for row in sent] == series["sent_bytes"]["mean"]
    assert [int(row["step"]) for row in sent] == series["step"]
    loss = [row for row in rows(tmp_path / "csv" / "loss.csv") if row["series"] == "training loss"]
    assert [int(row["step"]) for row in loss] == [step for step in range(12) if step != 7]
    bars = rows(tmp_path / "csv" / "phases.csv")
    forward = [row for row in bars if row["series"] == "forward" and row["row"] == "sparse: step"]
    assert float(forward[0]["length of time (ms)"]) == pytest.approx(
        1e3 * known["runs"][0]["phases"]["sparse"]["seconds"]["forward"], rel=1e-4
    )


def test_several_runs_have_tables_that_compare_them(tmp_path: Path) -> None:
    known = document(tmp_path, "a", "b", steps=6, warmup=2)
    known["runs"][1]["name"] = "../b: $x$ <i>"
    paths = write_tables(known, tmp_path / "csv")
    assert all(path.resolve().is_relative_to(tmp_path / "csv") for path in paths)
    names = [f"{chart.name}.csv" for chart in make_comparison(known["runs"])]
    assert [path.name for path in paths[: len(names) + 1]] == [*names, "finals.csv"]
    finals = rows(tmp_path / "csv" / "finals.csv")
    assert [row["run"] for row in finals] == ["a", "b"]
    assert float(finals[0]["val loss"]) == 6.5
    assert {row["series"] for row in rows(tmp_path / "csv" / "loss-steps.csv")} == {"a", "../b: $x$ <i>"}
    assert (tmp_path / "csv" / "0-a" / "loss.csv").exists()


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
@pytest.mark.parametrize("names", [("run",), ("a", "b")])
def test_the_picture_has_every_chart(kind: str, names: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    known = document(tmp_path, *names, steps=12, warmup=4, skipped={7: "rank 0: w"})
    known["runs"][0]["name"] = "a $\\frac{ <b>&amp;"  # no formula, and no HTML
    path = tmp_path / "new" / f"figure.{kind}"
    draw(known, path)
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind]
    assert path.read_bytes().startswith(start)
    if kind == "svg":
        texts = "\n".join(ElementTree.parse(path).getroot().itertext())
        charts = make_charts(known["runs"][0]) if len(names) == 1 else make_comparison(known["runs"])
        for chart in charts:
            assert chart.title in texts, chart.title
        assert "a $\\frac{ <b>&" in texts
        again = tmp_path / "again.svg"
        draw(known, again)
        assert again.read_bytes() == path.read_bytes()


def test_a_run_without_steps_is_a_picture_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    known = build_report([read_run(tmp_path / "run", "run")])
    draw(known, tmp_path / "empty.svg")
    assert write_tables(known, tmp_path / "csv") == []


def test_the_command_writes_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=4, warmup=2)
    assert main(["report", "run", "--figure", "x.svg", "--csv", "tables"]) == 0
    said = capsys.readouterr()
    assert "the figure is in x.svg\n" in said.out
    assert " tables are in tables\n" in said.out
    assert "When did the sparse phase start?" in said.out
    assert said.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "tables", "x.svg"]  # no page
    assert main(["report", "run", "--csv", "more", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["schema"] == {"name": "oktopk.report", "version": 1}
    assert said.err.endswith(" tables are in more\n")
    assert main(["report", "run", "--figure", "y.pdf", "-o", "page.html"]) == 0
    assert {"y.pdf", "page.html"} <= {path.name for path in tmp_path.iterdir()}


def test_what_is_missing_or_damaged_is_said_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=4, warmup=2)
    (tmp_path / "b" / "plan.json").unlink()
    (tmp_path / "b" / "config.toml").unlink()
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 3, "loss": "high"}\ngarbage\n{"event": "st')
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().err == ""
    assert main(["report", str(tmp_path / "b"), "-o", str(tmp_path / "b.html")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "oktopk report: The last line of metrics.jsonl is incomplete: the run is writing it, or was killed.",
        "oktopk report: 1 lines of metrics.jsonl are not JSON objects and were left out, starting with line 20.",
        "oktopk report: Values in metrics.jsonl that are not finite numbers were left out: loss (1).",
        "oktopk report: There is no plan.json.",
        "oktopk report: There is no config.toml.",
    ]
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--csv", str(tmp_path / "csv")]) == 0
    assert capsys.readouterr().err.splitlines() == [line.replace("report: ", "report: b: ") for line in said]
