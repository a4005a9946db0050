"""Folders that are broken, old, half written or made to do harm: a note, never a traceback, never executed."""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oktopk.tools.report import build_report, read_run
from oktopk.tools.report.html.page import build_page
from tests.support.report_runs import HOSTILE, write_run


def shown(folder: Path, name: str = "run") -> tuple[dict[str, Any], str]:
    """The document, which must be strict JSON, and the page."""
    document = build_report([read_run(folder, name)])
    strict: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return strict["runs"][0], build_page(document)


def notes(folder: Path) -> str:
    return " ".join(shown(folder)[0]["notes"])


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    said = notes(tmp_path)
    for name in ("metrics.jsonl", "plan.json", "config.toml"):
        assert f"no {name}" in said


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=5, warmup=2) / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"event":"step","step":5,"pha')
    run, _ = shown(tmp_path)
    assert run["about"]["steps"] == 5
    assert "is incomplete" in " ".join(run["notes"])


def test_lines_that_are_no_json_are_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=5, warmup=2) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\xff\xfe nonsense\n", b"[1, 2]\n", b"[" * 100_000 + b"\n", *lines[1:]]))
    run, _ = shown(tmp_path)
    assert run["about"]["steps"] == 5
    assert "3 lines of metrics.jsonl are not JSON objects and were left out, starting with line 2" in " ".join(
        run["notes"]
    )


def test_older_runs_without_traffic_or_plan(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=5, warmup=2) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [
        {key: value for key, value in row.items() if key != "traffic"} for row in rows if row["event"] != "train"
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    (tmp_path / "plan.json").unlink()
    said = notes(tmp_path)
    assert "no traffic by operation" in said
    assert "No training loop wrote this" in said
    assert "no plan.json" in said


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, warmup=1)
    for name in ("metrics.jsonl", "config.toml", "plan.json", "result.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    assert "no metrics.jsonl" in notes(tmp_path)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=6, warmup=2) / "metrics.jsonl"
    bad = ["12", None, 10**300, -5, [1], {"a": 1}, True]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for place, row in enumerate(rows):
        for at, name in enumerate(row):
            if name not in ("event", "step", "phase", "traffic"):
                row[name] = bad[(place + at) % len(bad)]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"event":"train","step":1e9999,"loss":NaN}\n'
    )
    assert shown(tmp_path)[0]["about"]["steps"] == 6


def changed(folder: Path, event: str, name: str, values: list[Any]) -> None:
    """The first lines of a kind have other values in a column."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, value in zip([row for row in rows if row["event"] == event], values, strict=False):
        row[name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_values_that_are_no_numbers_are_counted_by_column(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6, warmup=2)
    assert not [note for note in shown(tmp_path)[0]["notes"] if "not finite numbers" in note]
    changed(tmp_path, "train", "loss", [float("nan"), "7.0", None])
    changed(tmp_path, "step", "sent_bytes", [True])
    run, text = shown(tmp_path)
    said = "Values in metrics.jsonl that are not finite numbers were left out: loss (3), sent_bytes (1)."
    assert said in run["notes"]
    assert said in text
    assert run["series"]["loss"]["mean"][:3] == [None] * 3


def test_bytes_of_operations_and_ranks_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6, warmup=2)
    moved = {"operation": "all_gather", "stage": "x", "sent_bytes": "9", "sent_messages": None}
    changed(tmp_path, "step", "traffic", [[moved]])
    changed(tmp_path, "epoch", "sent_bytes", [{"dense": [1, "2", None]}])
    assert "left out: sent_bytes (3), sent_messages (1)." in notes(tmp_path)


def test_names_of_columns_without_numbers_are_text_and_few(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2, warmup=1)
    for name in (HOSTILE, *"abcdef"):
        changed(tmp_path, "validation", name, ["none"])
    run, text = shown(tmp_path)
    (note,) = (note for note in run["notes"] if "not finite numbers" in note)
    assert note.count("(1)") == 5
    assert note.endswith("d (1), ….")
    assert "<img src=x" not in text


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6, warmup=2, skipped={3: HOSTILE}, dnn=HOSTILE, algorithm=HOSTILE)
    path = tmp_path / "metrics.jsonl"
    with open(path, "a") as file:
        for operation in (HOSTILE, "\ud800\u2028"):
            moved = {
                "operation": operation,
                "stage": HOSTILE,
                "sent_bytes": 9,
                "sent_messages": 1,
                "sizes": {"3": 1},
            }
            step = {"event": "step", "step": 6, "phase": "sparse", "traffic": [moved], "sent_bytes": 9}
            file.write(json.dumps(step) + "\n")
        file.write(json.dumps({"event": "validation", "step": 6, HOSTILE: 1.0}) + "\n")
    (tmp_path / "config.toml").write_text(HOSTILE)
    (tmp_path / "plan.json").write_text(json.dumps({"sentence": HOSTILE, HOSTILE: 3, "volume": [HOSTILE, 7]}))
    _, text = shown(tmp_path, HOSTILE)
    text.encode("utf-8")
    assert len(re.findall(r"<script", text.partition("* plotly.js")[0])) == 2
    assert "<img src=x" not in text
    assert "<" not in text.partition('id="state">')[2].partition("</script>")[0]
    assert "&lt;img src=x" in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
COLUMNS = ["sent_bytes", "loss", "traffic", "skipped", "culprits", "size_entries", "target_count", "local_density",
           "target_density", "start_seconds", "stop_seconds", "handed_over_seconds", "hidden_share", "threshold",
           "step_seconds", "forward_seconds", "exposed_seconds", "phases", "bucket", "val loss"]  # fmt: skip
lines = st.fixed_dictionaries(
    {"event": st.sampled_from(["reduction", "step", "train", "epoch", "validation"]), "step": st.integers(-1, 4)},
    optional={"phase": st.sampled_from(["dense", "sparse", "", "x"]), **dict.fromkeys(COLUMNS, json_values)},
)


@given(st.lists(lines, max_size=8), json_values, json_values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_can_be_in_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[Any], plan: Any, result: Any
) -> None:
    monkeypatch.setattr(import_module("oktopk.tools.report.html.page"), "_plotly", lambda: "")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "result.json").write_text(json.dumps(result))
    shown(tmp_path)
