"""Sinks keep all they are told, in a form that others can read, whatever the numbers and whenever they end."""

from __future__ import annotations

import csv
import errno
import json
import logging
import math
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import OkTopkError
from oktopk.metrics import DENSE, SPARSE, ReductionEvent, Seconds, Span, StepEvent, Volume, Wire, combine
from oktopk.sinks import (
    CSVSink,
    JSONLSink,
    MemorySink,
    Sink,
    TensorBoardSink,
    TraceSink,
    TrainerLists,
    flat_reduction,
    flat_step,
    merge_traces,
)
from oktopk.sinks.csvfile import COLUMNS

FILES: dict[str, Callable[[Path], Sink]] = {
    "jsonl": JSONLSink,
    "csv of steps": CSVSink,
    "csv of reductions": lambda path: CSVSink(path, of="reduction"),
    "trace": TraceSink,
}
each_file = pytest.mark.parametrize("make", FILES.values(), ids=FILES.keys())


def reduction(
    step: int = 0, bucket: int = 0, count: int | None = 10, at: float = 100.0, **facts: Any
) -> ReductionEvent:
    """One second of a bucket with 1000 entries."""
    known: dict[str, Any] = {
        "step": step,
        "bucket": bucket,
        "phase": DENSE if count is None else SPARSE,
        "algorithm": "dense" if count is None else "oktopk",
        "volume": Volume.of(1000, count),
        "target_count": 1000 if count is None else 10,
        "local_count": 1000 if count is None else 12,
        "threshold": 0.5,
        "global_threshold": 0.25,
        "exact": True,
        "residual_norm": 3.0,
        "wire": Wire(80, 70, 4, 3, 20, 0),
        "seconds": Seconds(0.1, 0.2, 0.3, 0.1, 0.2, 0.1),
        "slowest_rank": 2,
        "skipped": False,
        "start": at,
        "stop": at + 1.0,
        "spans": (
            Span("select", at, at + 0.1),
            Span("exchange", at + 0.1, at + 0.5),
            Span("copy", at + 0.5, at + 1),
        ),
    }
    return ReductionEvent(**(known | facts))


def step(number: int = 0, count: int | None = 10, buckets: int = 2, **facts: Any) -> StepEvent:
    at = 100.0 + 10 * number
    parts = [reduction(number, i, count, at + i) for i in range(buckets)]
    known = {"skipped": False, "culprits": (), "start": at, "handed_over": at + 1.5, "stop": at + max(buckets, 2)}
    return combine(number, facts.pop("reductions", parts), **(known | facts))


numbers = st.floats(-1e300, 1e300) | st.sampled_from([math.inf, -math.inf, math.nan])
seconds = st.builds(Seconds, *6 * [numbers])
names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20)


@st.composite
def steps(draw: st.DrawFn) -> StepEvent:
    number = draw(st.integers(0, 10**6))
    sizes = st.integers(0, 2**40)
    parts = [
        reduction(
            number,
            bucket,
            draw(st.none() | st.integers(0, 1000)),
            threshold=draw(numbers),
            global_threshold=draw(numbers),
            residual_norm=draw(numbers),
            seconds=draw(seconds),
            wire=draw(st.builds(Wire, *6 * [sizes])),
            slowest_rank=draw(st.none() | st.integers(0, 8)),
            algorithm=draw(names),
        )
        for bucket in range(draw(st.integers(0, 3)))
    ]
    culprits = tuple(draw(st.lists(names, max_size=3)))
    return step(number, reductions=parts, culprits=culprits, skipped=bool(culprits), stop=draw(numbers))


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


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
    expected = [row for event in events for row in (*map(flat_reduction, event.reductions), flat_step(event))]
    assert lines(path) == expected


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


@each_file
def test_somebody_elses_file_is_refused_and_left_alone(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        make(path)
    assert path.read_text() == "dear diary"


@each_file
def test_a_path_that_cannot_be_written_is_an_error_at_once(make: Callable[[Path], Sink], tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="cannot be written") as caught:
        make(tmp_path)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written") as raised:
        make(tmp_path / "file" / "run")
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    CSVSink(tmp_path / "run.csv").close()
    before = (tmp_path / "run.csv").read_text()
    with pytest.raises(ValueError, match=r"other columns than those of a reduction.*missing: bucket"):
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


def every_sink(folder: Path) -> list[Sink]:
    files = [make(folder / name) for name, make in FILES.items()]
    return [*files, MemorySink(), TrainerLists(SimpleNamespace()), TensorBoardSink(folder / "board")]


def test_a_closed_sink_takes_no_more_and_closes_again(tmp_path: Path) -> None:
    for sink in every_sink(tmp_path):
        with sink:
            sink.emit(step(0))
        sink.close()
        with pytest.raises(OkTopkError, match=f"{type(sink).__name__} is closed: it cannot take step 1"):
            sink.emit(step(1))


def test_steps_without_buckets_and_steps_that_send_nothing_are_fine(tmp_path: Path) -> None:
    for sink in every_sink(tmp_path):
        with sink:
            sink.emit(step(0, buckets=0))
            sink.emit(step(1, count=0, skipped=True, culprits=("rank 1: layer.weight, bias", 'rank 2: "x"')))
    assert [row["culprits"] for row in table(tmp_path / "csv of steps")] == [
        "",
        'rank 1: layer.weight, bias; rank 2: "x"',
    ]
    assert len(table(tmp_path / "csv of reductions")) == 2


def test_events_may_come_from_another_thread(tmp_path: Path) -> None:
    for sink in every_sink(tmp_path):
        failed: list[BaseException] = []

        def work(sink: Sink = sink, failed: list[BaseException] = failed) -> None:
            try:
                for number in range(5):
                    sink.emit(step(number))
            except BaseException as error:
                failed.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join(timeout=60)
        assert not worker.is_alive()
        assert failed == []
        sink.close()


# Memory.


def test_memory_keeps_all_events_or_the_last_ones() -> None:
    events = [step(number) for number in range(5)]
    everything, some = MemorySink(), MemorySink(limit=2)
    for event in events:
        everything.emit(event)
        some.emit(event)
    assert everything.steps == events
    assert everything.reductions == [part for event in events for part in event.reductions]
    assert some.steps == events[-2:]
    assert len(some.reductions) == 4
    some.clear()
    assert (some.steps, some.by_phase()) == ([], {})
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        MemorySink(limit=0)


def test_what_was_read_from_memory_stays_what_it_is() -> None:
    sink = MemorySink()
    sink.emit(step(0))
    seen = sink.steps
    sink.emit(step(1))
    assert [event.step for event in seen] == [0]


def test_averages_are_those_of_each_phase() -> None:
    sink = MemorySink()
    for number, count in enumerate([None, None, None, 10, 30, 0]):
        sink.emit(step(number, count, skipped=count == 0))
    averages = sink.by_phase()
    assert list(averages) == [DENSE, SPARSE]
    dense, sparse = averages[DENSE], averages[SPARSE]
    assert (dense["steps"], dense["sparsity"], dense["compression_ratio"]) == (3, 0.0, 1.0)
    assert (dense["payload_bytes"], dense["skipped"]) == (8000, 0.0)
    assert (sparse["steps"], sparse["skipped"]) == (3, pytest.approx(1 / 3))
    assert sparse["sparsity"] == pytest.approx((0.99 + 0.97 + 1.0) / 3)
    assert sparse["compression_ratio"] == pytest.approx((100 + 1000 / 30 + 1) / 3)
    assert sparse["payload_bytes"] == pytest.approx((160 + 480 + 0) / 3)
    assert not {"step", "slowest_rank", "start_seconds", "phase"} & set(sparse)


@given(st.lists(steps(), max_size=5))
def test_averages_are_finite_and_lie_between_the_numbers_they_are_made_of(events: list[StepEvent]) -> None:
    sink = MemorySink()
    for event in events:
        sink.emit(event)
    averages = sink.by_phase()
    assert set(averages) == {event.phase for event in events}
    for phase, means in averages.items():
        rows = [flat_step(event) for event in events if event.phase == phase]
        for name in set(means) - {"steps"}:
            values = [float(row[name]) for row in rows if row[name] is not None]
            assert math.isfinite(means[name])
            assert min(values) <= means[name] * (1 + 1e-12) or means[name] == pytest.approx(min(values))
            assert max(values) >= means[name] * (1 - 1e-12) or means[name] == pytest.approx(max(values))


# The trainer's lists.


class Trainer:
    pass


def lists_of(trainer: Any) -> tuple[list[float], list[float], list[int]]:
    return trainer.sparsities, trainer.compression_ratios, trainer.communication_sizes


def test_the_lists_have_one_entry_per_step_in_both_phases() -> None:
    trainer = Trainer()
    sink = TrainerLists(trainer)
    assert lists_of(trainer) == ([], [], [])
    for number, count in enumerate([None, 40, 0]):
        sink.emit(step(number, count))
    assert lists_of(trainer) == ([0.0, 0.96, 1.0], [1.0, 25.0, 1.0], [8000, 640, 0])


def test_lstman4_sends_110278272_bytes_in_a_dense_step() -> None:
    trainer = Trainer()
    whole = Volume.of(27_569_568, None)
    TrainerLists(trainer).emit(step(reductions=[reduction(count=None, volume=whole)]))
    assert lists_of(trainer) == ([0.0], [1.0], [110_278_272])


@given(st.lists(st.none() | st.integers(0, 1000) | st.sampled_from(["new", "clear", "one new", "one gone"])))
def test_the_lists_are_of_one_length_whatever_the_trainer_does(story: list[Any]) -> None:
    trainer: Any = Trainer()
    sink = TrainerLists(trainer)
    expected: list[tuple[float, float, int]] = []
    for what in story:
        if what == "new":
            trainer.sparsities, trainer.compression_ratios, trainer.communication_sizes = [], [], []
        elif what == "clear":
            for values in lists_of(trainer):
                if values is not None:
                    values.clear()
        elif what == "one new":
            trainer.compression_ratios = []
        elif what == "one gone":
            trainer.sparsities = None
        else:
            event = step(0, what)
            sink.emit(event)
            expected.append((event.volume.sparsity, event.volume.ratio, event.volume.payload_bytes))
            assert list(zip(*lists_of(trainer), strict=True)) == expected
        if isinstance(what, str):
            expected = []


def test_of_a_list_that_is_too_long_the_newest_entries_stay() -> None:
    trainer = SimpleNamespace(sparsities=[0.1, 0.5], compression_ratios=[2.0], communication_sizes=[1, 2, 16])
    TrainerLists(trainer).emit(step(0, 40))
    assert lists_of(trainer) == ([0.5, 0.96], [2.0, 25.0], [16, 640])


def test_lists_that_exist_are_used() -> None:
    trainer = SimpleNamespace(sparsities=[0.5], compression_ratios=[2.0], communication_sizes=[16])
    mine = trainer.sparsities
    TrainerLists(trainer).emit(step(0, 40))
    assert trainer.sparsities is mine
    assert lists_of(trainer) == ([0.5, 0.96], [2.0, 25.0], [16, 640])


def test_the_first_metric_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="oktopk"):
        sink = TrainerLists(Trainer())
        for number in range(3):
            sink.emit(step(number, None))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "Trainer" in caplog.text
    assert "step 0 (dense)" in caplog.text


def test_a_trainer_without_room_for_lists_is_refused() -> None:
    with pytest.raises(TypeError, match="sparsities"):
        TrainerLists(object())
    with pytest.raises(TypeError, match="compression_ratios must be a list, got tuple"):
        TrainerLists(SimpleNamespace(compression_ratios=()))


# TensorBoard.


def curves(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
    return found


def test_curves_agree_with_the_events(tmp_path: Path) -> None:
    events = [step(0, None), step(1, 40), step(2, reductions=[reduction(2, threshold=math.nan)])]
    with TensorBoardSink(tmp_path / "board") as sink:
        for event in events:
            sink.emit(event)
    found = curves(tmp_path / "board")
    assert found["volume/sparsity"] == pytest.approx({0: 0.0, 1: 0.96, 2: 0.99})
    assert found["volume/payload_bytes"] == {0: 8000, 1: 640, 2: 80}
    assert found["wire/sent_bytes"] == {0: 160, 1: 160, 2: 80}
    assert found["time/exposed_seconds"] == pytest.approx({0: 0.5, 1: 0.5, 2: 0.5})
    assert found["state/sparse_phase"] == {0: 0, 1: 1, 2: 1}
    assert found["bucket 00/threshold"] == {0: 0.5, 1: 0.5}  # what is not a number has no point
    assert found["bucket 01/global_density"] == pytest.approx({0: 1.0, 1: 0.04})


def test_only_every_nth_step_is_drawn(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path, every=3) as sink:
        for number in range(7):
            sink.emit(step(number))
    assert list(curves(tmp_path)["volume/sparsity"]) == [0, 3, 6]
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        TensorBoardSink(tmp_path, every=0)


def test_without_tensorboard_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'oktopk\[train\]'"):
        TensorBoardSink(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        TensorBoardSink(tmp_path / "file")


# Traces.


def slices(events: list[Any], kind: str) -> list[Any]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    ends = [event["ts"] + event["dur"] for event in (inner, outer)]
    return inner["tid"] == outer["tid"] and outer["ts"] <= inner["ts"] and ends[0] <= ends[1]


def test_a_trace_has_steps_reductions_stages_and_curves(tmp_path: Path) -> None:
    with TraceSink(tmp_path / "run.json", rank=3) as sink:
        for number in range(3):
            sink.emit(step(number))
    events = strict((tmp_path / "run.json").read_text())
    assert {event["pid"] for event in events} == {3}
    whole = slices(events, "step")
    assert [event["name"] for event in whole] == [
        name for i in range(3) for name in (f"step {i} (sparse)", "exposed")
    ]
    assert [event["dur"] for event in whole] == 3 * [2_000_000, 500_000]
    assert all(inside(whole[i + 1], whole[i]) for i in (0, 2, 4))
    parts = slices(events, "reduction")
    assert [event["name"] for event in parts] == 3 * ["bucket 0 (sparse)", "bucket 1 (sparse)"]
    assert [event["dur"] for event in parts] == 6 * [1_000_000]
    assert parts[0]["args"]["sent_bytes"] == 80
    stages = slices(events, "stage")
    assert [event["name"] for event in stages] == 6 * ["select", "exchange", "copy"]
    assert all(inside(stage, parts[i // 3]) for i, stage in enumerate(stages))
    assert {event["tid"] for event in whole}.isdisjoint({event["tid"] for event in parts})
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters == 3 * [
        ("bytes sent", {"sent": 160}),
        ("density", {"target": 0.01, "sent": 0.012, "result": 0.01}),
    ]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {whole[0]["tid"]: "steps", parts[0]["tid"]: "worker"}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 3"]


moments = st.floats(0, 5e7)


@given(moments, st.lists(moments, min_size=2, max_size=2), st.lists(st.tuples(moments, moments), max_size=4))
def test_stages_lie_in_their_reduction_whatever_the_times(
    tmp_path_factory: pytest.TempPathFactory, shift: float, ends: list[float], spans: list[tuple[float, float]]
) -> None:
    start, stop = (shift + end for end in sorted(ends))
    stages = tuple(Span("stage", *sorted(span)) for span in spans)
    path = tmp_path_factory.mktemp("trace") / "run.json"
    with TraceSink(path) as sink:
        sink.emit(step(reductions=[reduction(at=0.0, start=start, stop=stop, spans=stages)]))
    events = strict(path.read_text())
    drawn = slices(events, "stage")
    if stop == 0:
        assert drawn == []
        return
    (outer,) = slices(events, "reduction")
    assert len(drawn) == len(stages)
    assert all(inside(stage, outer) for stage in drawn)
    assert [stage["ts"] for stage in drawn] == sorted(stage["ts"] for stage in drawn)


def test_stages_within_stages_come_after_the_outer_one(tmp_path: Path) -> None:
    spans = (Span("inner", 100.2, 100.4), Span("outer", 100.2, 100.9))  # in the order they ended
    with TraceSink(tmp_path / "run.json") as sink:
        sink.emit(step(reductions=[reduction(spans=spans)]))
    outer, inner = slices(strict((tmp_path / "run.json").read_text()), "stage")
    assert (outer["name"], inner["name"]) == ("outer", "inner")
    assert inside(inner, outer)


def test_reductions_that_overlap_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    parts = [reduction(bucket=bucket, at=100 + at) for bucket, at in enumerate([0.0, 0.5, 1.0, 1.2])]
    with TraceSink(tmp_path / "run.json") as sink:
        sink.emit(step(reductions=parts))
        sink.emit(step(1, reductions=parts))
    events = strict((tmp_path / "run.json").read_text())
    tracks = [event["tid"] for event in slices(events, "reduction")]
    first, second, third = sorted(set(tracks))
    assert tracks == 2 * [first, second, first, third]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert named == ["steps", "worker", "worker 2", "worker 3"]


def test_the_trace_of_a_killed_run_needs_only_a_bracket(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "run.json")
    for number in range(3):
        events = strict((tmp_path / "run.json").read_text() + "]")
        assert len(slices(events, "reduction")) == 2 * number
        sink.emit(step(number))
    killed = strict((tmp_path / "run.json").read_text() + "]")
    sink.close()
    assert strict((tmp_path / "run.json").read_text()) == killed


def test_a_trace_that_has_only_begun_can_be_continued(tmp_path: Path) -> None:
    for begun in ("", "[\n", '[\n{"ph":', "[\n]\n"):
        (tmp_path / "run.json").write_text(begun)
        with TraceSink(tmp_path / "run.json") as sink:
            sink.emit(step(0))
        assert len(slices(strict((tmp_path / "run.json").read_text()), "reduction")) == 2


def test_traces_are_in_microseconds_of_the_wall_clock(tmp_path: Path) -> None:
    earliest = time.time()
    now = time.perf_counter()
    with TraceSink(tmp_path / "run.json") as sink:
        sink.emit(step(start=now, stop=now + 1))
    latest = time.time()
    begin = slices(strict((tmp_path / "run.json").read_text()), "step")[0]["ts"]
    assert isinstance(begin, int)
    assert earliest - 0.01 <= begin / 1e6 <= latest + 0.01  # the two clocks tick a little differently


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    event = step()
    with TraceSink(tmp_path / "run.json") as sink:
        sink.emit(event)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(300):
                sink.emit(event)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert (tmp_path / "run.json").stat().st_size > 300_000
        assert grown < 50_000


def test_traces_of_all_ranks_merge_into_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.json" for rank in range(3)]
    sinks = [TraceSink(path, rank=rank) for rank, path in enumerate(paths)]
    for sink in sinks:
        sink.emit(step(0))
    sinks[0].close()
    torn = paths[1].read_bytes() + b',{"ph":"X","na'
    paths[1].write_bytes(torn)
    merge_traces(paths, tmp_path / "all.json")
    merged = strict((tmp_path / "all.json").read_text())
    for sink in sinks:
        sink.close()
    single = strict(paths[0].read_text())
    assert [len(slices([e for e in merged if e["pid"] == rank], "reduction")) for rank in range(3)] == [2, 2, 2]
    assert [event for event in merged if event["pid"] == 0] == single
    assert len(merged) == 3 * len(single)
    threads = {event["tid"]: event["pid"] for event in merged if "tid" in event}
    assert all(threads[event["tid"]] == event["pid"] for event in merged if "tid" in event)
    assert not set(threads) & {0, 1, 2}
    merge_traces([tmp_path / "all.json"], tmp_path / "again.json")
    assert strict((tmp_path / "again.json").read_text()) == merged


def test_what_is_not_a_trace_cannot_be_merged(tmp_path: Path) -> None:
    with TraceSink(tmp_path / "a.json") as sink:
        sink.emit(step(0))
    whole = (tmp_path / "a.json").read_text()
    (tmp_path / "notes.txt").write_text("dear diary\n")
    with pytest.raises(ValueError, match=r"notes\.txt is not a trace"):
        merge_traces([tmp_path / "a.json", tmp_path / "notes.txt"], tmp_path / "out.json")
    (tmp_path / "b.json").write_text('[\n{"ph":"M"}\n,{"ph"\n]\n')
    with pytest.raises(ValueError, match=r"b\.json:3 is no line of a trace"):
        merge_traces([tmp_path / "b.json"], tmp_path / "out.json")
    with pytest.raises(ValueError, match="choose another file"):
        merge_traces([tmp_path / "a.json"], tmp_path / "sub" / ".." / "a.json")
    assert (tmp_path / "a.json").read_text() == whole
