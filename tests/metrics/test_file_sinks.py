"""Files hold what the events say, in a form that others can read, whatever the numbers and whenever they end."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.metrics.events import SPARSE, StepEvent
from oktopk.metrics.sinks import CSVSink, JSONLSink, Sink, flat_reduction, flat_step
from oktopk.metrics.sinks.csvfile import COLUMNS
from oktopk.metrics.sinks.flat import flat_traffic
from oktopk.metrics.traffic import Operation, Traffic
from tests.support.events import FILES, lines, reduction, step, steps, strict, table

each_file = pytest.mark.parametrize("make", FILES.values(), ids=FILES.keys())


def same_cell(cell: str, value: object) -> bool:
    if isinstance(value, float):
        return float(cell) == value
    return cell == ("" if value is None else str(value))


# The flat row.


def test_a_row_says_what_the_event_says() -> None:
    event = step(7, count=40)
    row = flat_step(event)
    assert row["event"] == "step"
    assert (row["step"], row["phase"], row["buckets"]) == (7, SPARSE, 2)
    assert (row["size_entries"], row["count"], row["payload_bytes"]) == (2000, 80, 640)
    assert (row["sparsity"], row["compression_ratio"]) == (0.96, 25.0)
    assert (row["target_density"], row["local_density"], row["global_density"]) == (0.01, 0.012, 0.04)
    assert (row["sent_bytes"], row["received_bytes"], row["control_bytes"]) == (160, 140, 40)
    assert (row["sent_messages"], row["received_messages"], row["modelled_bytes"]) == (8, 6, 0)
    assert [row[f"{name}_seconds"] for name in ("select", "encode", "exchange", "decode", "wait", "other")] == [
        *(0.2, 0.4, 0.6, 0.2, 0.4, 0.2)
    ]
    assert (row["busy_seconds"], row["elapsed_seconds"], row["exposed_seconds"]) == (pytest.approx(2.0), 2.0, 0.5)
    assert row["hidden_share"] == pytest.approx(0.75)
    assert (row["slowest_rank"], row["skipped"], row["culprits"]) == (2, False, "")
    part = flat_reduction(event.reductions[1])
    assert (part["event"], part["step"], part["bucket"], part["algorithm"]) == ("reduction", 7, 1, "oktopk")
    assert (part["threshold"], part["global_threshold"], part["exact"]) == (0.5, 0.25, True)
    assert (part["count"], part["sent_bytes"], part["wait_seconds"]) == (40, 80, 0.2)


@given(steps())
def test_rows_have_the_columns_they_announce_and_only_finite_numbers(event: StepEvent) -> None:
    rows = {"step": [flat_step(event)], "reduction": [flat_reduction(part) for part in event.reductions]}
    for of, found in rows.items():
        for row in found:
            assert tuple(row) == COLUMNS[of]
            assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))


# JSONL and CSV.


@given(events=st.lists(steps(), max_size=4))
def test_lines_are_strict_json_and_agree_with_the_events(
    tmp_path_factory: pytest.TempPathFactory, events: list[StepEvent]
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "run.jsonl"
    with JSONLSink(path) as sink:
        for event in events:
            sink.emit(event)
    expected = [
        row
        for event in events
        for row in (*map(flat_reduction, event.reductions), flat_step(event) | {"traffic": flat_traffic(event)})
    ]
    assert lines(path) == json.loads(json.dumps(expected))  # where keys are strings


@given(events=st.lists(steps(), max_size=4))
def test_tables_agree_with_the_lines(tmp_path_factory: pytest.TempPathFactory, events: list[StepEvent]) -> None:
    folder = tmp_path_factory.mktemp("csv")
    sinks = [
        JSONLSink(folder / "run.jsonl"),
        CSVSink(folder / "step.csv"),
        CSVSink(folder / "reduction.csv", of="reduction"),
    ]
    for sink in sinks:
        with sink:
            for event in events:
                sink.emit(event)
    for of in COLUMNS:
        rows = table(folder / f"{of}.csv")
        wanted = [line for line in lines(folder / "run.jsonl") if line["event"] == of]
        assert len(rows) == len(wanted)
        for row, line in zip(rows, wanted, strict=True):
            line.pop("traffic", None)  # no table has room for it
            assert row.keys() == line.keys()
            assert all(same_cell(row[name], line[name]) for name in line), (row, line)


def test_a_number_that_is_not_finite_is_null_and_an_empty_cell(tmp_path: Path) -> None:
    event = step(reductions=[reduction(threshold=math.inf, residual_norm=math.nan)])
    with JSONLSink(tmp_path / "a.jsonl") as sink:
        sink.emit(event)
    with CSVSink(tmp_path / "a.csv") as sink:
        sink.emit(event)
    part, whole = lines(tmp_path / "a.jsonl")
    assert (part["threshold"], part["residual_norm"], whole["residual_norm"]) == (None, None, None)
    assert table(tmp_path / "a.csv")[0]["residual_norm"] == ""


def test_the_traffic_of_a_step_is_that_of_its_buckets(tmp_path: Path) -> None:
    gather, sizes = Operation("all_gather", "winners"), Operation("all_gather", "sizes", control=True)
    parts = [
        {gather: Traffic(10, 20, 1, 2, 0.5, sizes={3: 1})},
        {gather: Traffic(9, sizes={3: 1}), sizes: Traffic(8)},
    ]
    event = step(reductions=[reduction(bucket=i, traffic=part) for i, part in enumerate(parts)])
    with JSONLSink(tmp_path / "a.jsonl") as sink:
        sink.emit(event)
    told = lines(tmp_path / "a.jsonl")[-1]["traffic"]
    assert [(row["operation"], row["stage"], row["control"], row["sent_bytes"]) for row in told] == [
        ("all_gather", "winners", False, 19),
        ("all_gather", "sizes", True, 8),
    ]
    assert told[0]["sizes"] == {"3": 2}
    assert (told[0]["received_bytes"], told[0]["seconds"], told[0]["modelled"]) == (20, 0.5, False)


# All files.


def records(path: Path) -> list[object]:
    """What a file holds, whichever it is; an array may lack its end."""
    text = path.read_text()
    if text.startswith("["):
        return [event for event in strict(text if text.endswith("]\n") else text + "]") if event["ph"] != "M"]
    return list(lines(path)) if text.startswith("{") else list(table(path))


@each_file
def test_every_step_is_in_the_file_before_the_next(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "run"
    sink = make(path)
    found = []
    for number in range(3):
        sink.emit(step(number))
        found.append(len(records(path)))
    sink.close()
    assert found[0] > 0
    assert found == [found[0], 2 * found[0], 3 * found[0]]
    assert len(records(path)) == found[-1]


@each_file
@pytest.mark.parametrize("closed", [True, False])
def test_a_later_run_goes_on_in_the_same_file(make: Callable[[Path], Sink], closed: bool, tmp_path: Path) -> None:
    first = make(tmp_path / "run")
    first.emit(step(0))
    if closed:
        first.close()
    before = records(tmp_path / "run")
    with make(tmp_path / "run") as second:
        second.emit(step(1))
    after = records(tmp_path / "run")
    assert after[: len(before)] == before
    assert len(after) == 2 * len(before)
    first.close()


@each_file
def test_a_line_that_a_killed_run_left_unfinished_is_cut_off(
    make: Callable[[Path], Sink], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tmp_path / "whole"
    with make(whole) as sink:
        sink.emit(step(0))
    of_one_step = len(records(whole))
    text = whole.read_bytes().removesuffix(b"]\n")
    start = text.rfind(b"\n", 0, -1) + 1
    kept = text[:start]
    whole.write_bytes(kept)
    before = records(whole)
    for end in {*range(start + 1, start + 100), *range(start + 100, len(text) - 1, 37), len(text) - 2}:
        path = tmp_path / "torn"
        path.write_bytes(text[:end])
        caplog.clear()
        with make(path) as sink:
            sink.emit(step(1))
        assert path.read_bytes().startswith(kept)
        assert "unfinished line" in caplog.text
        assert len(records(path)) == len(before) + of_one_step


def test_a_whole_line_that_only_lacks_its_line_feed_is_kept(tmp_path: Path) -> None:
    with JSONLSink(tmp_path / "run") as sink:
        sink.emit(step(0))
    before = lines(tmp_path / "run")
    (tmp_path / "run").write_bytes((tmp_path / "run").read_bytes().removesuffix(b"\n"))
    with JSONLSink(tmp_path / "run") as sink:
        sink.emit(step(0))
    assert lines(tmp_path / "run") == 2 * before
    CSVSink(tmp_path / "run.csv").close()
    header = (tmp_path / "run.csv").read_bytes()
    (tmp_path / "run.csv").write_bytes(header.removesuffix(b"\n"))
    CSVSink(tmp_path / "run.csv").close()
    assert (tmp_path / "run.csv").read_bytes() == header


def test_a_last_line_that_nests_too_deep_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(b'{"event":' + b"[" * 200_000)
    with JSONLSink(path) as sink:
        sink.emit(step(0))
    assert {row["step"] for row in lines(path)} == {0}


@each_file
def test_somebody_elses_file_is_refused_and_left_alone(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        make(path)
    assert path.read_text() == "dear diary"


@each_file
def test_a_path_that_cannot_be_written_is_an_error_at_once(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="cannot write metrics") as caught:
        make(tmp_path)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write metrics") as raised:
        make(tmp_path / "file" / "run")
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    CSVSink(tmp_path / "run.csv").close()
    before = (tmp_path / "run.csv").read_text()
    with pytest.raises(ValueError, match=r"other columns than reduction events have.*missing: bucket"):
        CSVSink(tmp_path / "run.csv", of="reduction")
    assert (tmp_path / "run.csv").read_text() == before
    with pytest.raises(ValueError, match="of must be one of step, reduction, got 'bucket'"):
        CSVSink(tmp_path / "run.csv", of="bucket")


def test_a_table_has_one_header(tmp_path: Path) -> None:
    for number in range(3):
        with CSVSink(tmp_path / "run.csv") as sink:
            sink.emit(step(number))
    header, *rows = (tmp_path / "run.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS["step"])
    assert [row.split(",")[1] for row in rows] == ["0", "1", "2"]
