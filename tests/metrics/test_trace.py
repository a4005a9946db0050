"""Traces show when everything happened, can be read at any time, and merge into one."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.metrics.events import Span
from oktopk.metrics.sinks import TraceSink, merge_traces
from tests.support.events import reduction, step, strict


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
    assert earliest - 5 <= begin / 1e6 <= latest + 5  # the two clocks are not read at the same moment


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
    with pytest.raises(ValueError, match=r"b\.json:3 is not a valid trace line"):
        merge_traces([tmp_path / "b.json"], tmp_path / "out.json")
    with pytest.raises(ValueError, match="choose another file"):
        merge_traces([tmp_path / "a.json"], tmp_path / "sub" / ".." / "a.json")
    assert (tmp_path / "a.json").read_text() == whole
