"""What all sinks have in common, and those that write no rows: memory, the trainer's lists, TensorBoard."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import OkTopkError
from oktopk.metrics.events import DENSE, SPARSE, StepEvent, Volume
from oktopk.metrics.sinks import MemorySink, Sink, TensorBoardSink, TrainerLists, flat_step
from oktopk.utils.extras import install_command
from tests.support.disks import fill_disk
from tests.support.events import FILES, reduction, step, steps, table

# All sinks.


def every_sink(folder: Path) -> list[Sink]:
    files = [make(folder / name) for name, make in FILES.items()]
    return [*files, MemorySink(), TrainerLists(SimpleNamespace()), TensorBoardSink(folder / "board")]


def test_a_closed_sink_takes_no_more_and_closes_again(tmp_path: Path) -> None:
    for sink in every_sink(tmp_path):
        with sink:
            sink.emit(step(0))
        sink.close()
        with pytest.raises(OkTopkError, match=f"{type(sink).__name__} is closed: cannot record step 1"):
            sink.emit(step(1))


def test_a_signal_may_close_a_sink_in_the_thread_that_emits() -> None:
    """The handler runs inside emit(): it must not wait for the thread that it interrupts."""
    made: list[Sink] = []

    class Interrupted(Sink):
        def _write(self, event: StepEvent) -> None:
            made[0].close()

    made.append(Interrupted())
    thread = threading.Thread(target=made[0].emit, args=(step(0),), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(OkTopkError, match="is closed"):
        made[0].emit(step(1))


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


def test_a_sink_on_a_full_disk_is_switched_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it wrote before can be read; a TensorBoard writer notices in its own thread, some steps later."""
    sinks = every_sink(tmp_path)
    for sink in sinks:
        sink.emit(step(0))
    board = next(sink for sink in sinks if isinstance(sink, TensorBoardSink))
    board._writer.flush()
    written = {path: path.read_bytes() for path in tmp_path.glob("csv*")}
    fill_disk(tmp_path)
    for number in range(1, 4):
        for sink in sinks:
            sink.emit(step(number))
        board._writer.flush()
    for sink in sinks:
        sink.close()
    off = [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]
    names = [type(sink).__name__ for sink in sinks if not isinstance(sink, (MemorySink, TrainerLists))]
    assert sorted(said.partition(" ")[0] for said in off) == sorted(names)
    for said in off:
        assert " is switched off, and training continues without it: " in said
        assert said.endswith("No space left on device")
    assert {path: path.read_bytes() for path in tmp_path.glob("csv*")} == written


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EFBIG", "EROFS"])
def test_only_errors_of_the_disk_switch_a_sink_off(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Sink):
        number = getattr(errno, name)

        def _write(self, event: StepEvent) -> None:
            raise OSError(self.number, os.strerror(self.number), "metrics")

    sink = Failing()
    for number in range(3):
        sink.emit(step(number))
    (warning,) = caplog.records
    assert f"Failing is switched off, and training continues without it: metrics: {os.strerror(sink.number)}" in (
        warning.getMessage()
    )
    other = Failing()
    other.number = errno.EACCES
    with pytest.raises(PermissionError):
        other.emit(step(0))


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
    with pytest.raises(ImportError, match=re.escape(install_command("train"))):
        TensorBoardSink(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write metrics"):
        TensorBoardSink(tmp_path / "file")
