"""The folder of a run: its options, its metrics, and its checkpoints.

config.toml      every option with its origin; --config accepts it
plan.json        the plan: steps, warm-up, expected bytes
metrics.jsonl    one line per reduction, step, epoch and validation
timing.csv       one row per step: where its time went
events.out.…     the metrics for TensorBoard
result.json      the final results
train.log        the log
checkpoints/     what --resume continues from
.lock            held by the process that writes the folder
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from oktopk.metrics.events import MetricsSink
from oktopk.metrics.sinks import SINKS, JSONLSink, Sink, TensorBoardSink, as_sink
from oktopk.metrics.sinks.flat import Row, finite
from oktopk.metrics.sinks.switch import DISK_ERRORS, Switch
from oktopk.utils.files import atomic_path, make_folder, remove_drafts, write_atomically
from oktopk.utils.locks import LOCK, FolderInUseError, FolderLock
from oktopk.utils.registry import explain

from .config.options import ConfigError, TrainConfig
from .config.origins import ResolvedConfig, to_toml
from .metrics import StepMetrics

CONFIG, PLAN, RESULT, CHECKPOINTS = "config.toml", "plan.json", "result.json", "checkpoints"
METRICS, TIMING = "metrics.jsonl", "timing.csv"
_FROM_REDUCER = (
    *("select_seconds", "encode_seconds", "exchange_seconds", "decode_seconds", "wait_seconds"),
    *("other_seconds", "hidden_share", "sent_bytes", "received_bytes"),
)


def new_name(config: TrainConfig) -> str:
    """Name a run without --out after its options and its start time."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    known = config.densities
    name = "schedule" if isinstance(known, tuple) else known if isinstance(known, str) else f"{known:g}"
    density = "" if config.algorithm == "dense" else f"-{name}"
    return f"{config.dnn}-{config.algorithm}{density}-seed{config.seed}-{now}"


def check_unused(folder: Path) -> None:
    """Refuse a folder that already holds a run."""
    if (folder / CONFIG).exists():
        raise ConfigError(f"{folder} already holds a run: resume it with --resume {folder}, or pass another --out")


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder that another process writes, or that holds a run and is not to be resumed."""
    if (folder / LOCK).exists():
        _lock(folder).close()
    if not resume:
        check_unused(folder)


class RunFolder:
    """Rank 0 writes the folder, which it locks; the other ranks only use its checkpoints.

    open_metrics() is called once the first step is known. It removes the lines of later steps, which a run wrote
    before it died without saving them.
    """

    def __init__(self, path: Path, writes: bool, resume: bool = False) -> None:
        self.path, self._writes = path, writes
        self.checkpoints = path / CHECKPOINTS
        self._lines: JSONLSink | None = None
        self._board: TensorBoardSink | None = None
        self._timing: TimingFile | None = None
        self._further: list[Sink] = []
        self._log: logging.FileHandler | None = None
        self._lock: FolderLock | None = None
        if writes:
            make_folder(path)
            self._lock = _lock(path)
            with ExitStack() as on_error:
                on_error.callback(self._lock.close)
                if not resume:  # again: another run may have come and gone since check_folder()
                    check_unused(path)
                for name in (CONFIG, PLAN, RESULT, METRICS, TIMING):
                    remove_drafts(path / name)
                self._log = _log_to(path / "train.log")
                on_error.pop_all()

    def open_sinks(self, names: str | None) -> None:
        """Open further sinks in the folder; commas separate their names."""
        for name in names.split(",") if names and self._writes else ():
            try:
                self._further.append(as_sink(SINKS.find(name)(self.path)))
            except Exception as error:
                raise ConfigError(f"--sinks: {name!r} cannot be opened: {explain(error)}") from error

    def open_metrics(self, step: int) -> list[MetricsSink]:
        """Open the metric files from this step on; returns the sinks for the reducer."""
        if not self._writes:
            return []
        _rewind_lines(self.path / METRICS, step)
        _rewind_table(self.path / TIMING, step)
        self._lines = JSONLSink(self.path / METRICS)
        self._board = TensorBoardSink(self.path, first_step=step)
        self._timing = TimingFile(self.path / TIMING)
        return [self._lines, self._board, *self._further]

    @property
    def trains(self) -> bool:
        """Whether this rank writes the metrics of steps: the run has started, or resumed."""
        return self._lines is not None

    def write_config(self, resolved: ResolvedConfig) -> None:
        if self._writes:
            write_atomically(self.path / CONFIG, to_toml(resolved).encode())

    def write_step(self, metrics: StepMetrics, event: Row) -> None:
        """Write a step; `event` has the reducer's columns, from flat_step."""
        if self._lines is None or self._board is None or self._timing is None:
            return
        row = {name: value for name, value in asdict(metrics).items() if name != "step"}
        self.record("train", metrics.step, row)
        self._timing.write(metrics, event)

    def record(self, kind: str, step: int, row: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl, and its numbers to TensorBoard as "kind/name"."""
        if self._lines is None or self._board is None:
            return
        clean = {name: finite(value) for name, value in row.items()}
        self._lines.add(kind, step, clean)
        numbers = {f"{kind}/{name}": x for name, x in clean.items() if isinstance(x, (int, float))}
        self._board.add(step, numbers)

    def write_plan(self, row: Mapping[str, Any]) -> None:
        self._write_json(PLAN, row)

    def write_result(self, row: Mapping[str, Any]) -> None:
        self._write_json(RESULT, row)

    def _write_json(self, name: str, row: Mapping[str, Any]) -> None:
        if self._writes:
            text = json.dumps(finite(row), indent=2, allow_nan=False) + "\n"
            write_atomically(self.path / name, text.encode())

    def remove_result(self) -> None:
        """Remove the result of an earlier end: the run continues."""
        if self._writes:
            (self.path / RESULT).unlink(missing_ok=True)

    def close(self) -> None:
        """Close every file, even if one of them fails, for example on a full disk."""
        with ExitStack() as parts:
            if self._lock is not None:
                parts.callback(self._lock.close)  # the last
            if self._log is not None:
                parts.callback(self._log.close)
                parts.callback(logging.getLogger("oktopk").removeHandler, self._log)
            for part in (self._lines, self._board, self._timing, *self._further):
                if part is not None:
                    parts.callback(part.close)


def _lock(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except FolderInUseError as error:
        raise ConfigError(f"{error}: wait until that run has ended, or pass another --out") from error


class TimingFile:
    """Writes timing.csv; appends to an existing file. On a full disk it is switched off, as sinks are."""

    def __init__(self, path: Path) -> None:
        self._switch = Switch(TIMING)
        own = [item.name for item in fields(StepMetrics)]
        self._names, self._path = [*own, *_FROM_REDUCER], path
        fresh = not path.exists() or path.stat().st_size == 0
        self._file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - close() closes it
        self._writer = csv.writer(self._file, lineterminator="\n")
        if fresh:
            self._writer.writerow(self._names)

    def write(self, metrics: StepMetrics, event: Row) -> None:
        known = {**event, **asdict(metrics)}
        self._switch.run(lambda: self._write([known[name] for name in self._names]))

    def _write(self, row: list[Any]) -> None:
        try:
            self._writer.writerow(row)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._switch.close(self._file.close)


def _rewind_lines(path: Path, step: int) -> None:
    """Remove the lines of this step and later ones; epoch and validation lines hold the number of steps done."""

    def keep(line: bytes) -> bool:
        try:
            row = json.loads(line)
            return bool(row["step"] < step + (row["event"] in ("epoch", "validation")))
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    _filter_lines(path, keep)


def _rewind_table(path: Path, step: int) -> None:
    def keep(line: bytes) -> bool:
        number = line.partition(b",")[0]
        return number == b"step" or (
            number.isdigit() and len(number) < 20 and int(number) < step and line.endswith(b"\n")
        )

    _filter_lines(path, keep)


def _filter_lines(path: Path, keep: Callable[[bytes], bool]) -> None:
    """Keep only the lines for which keep(line) is true; the file is rewritten only if it changes."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        if all(map(keep, file)):
            return
    with open(path, "rb") as file, atomic_path(path) as draft, open(draft, "wb") as out:
        out.writelines(line for line in file if keep(line))


class _LogFile(logging.FileHandler):
    """Writes train.log. On a full disk it is switched off, as sinks are."""

    def __init__(self, path: Path) -> None:
        self._switch = Switch(path.name)
        super().__init__(path, encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        self._switch.run(lambda: logging.FileHandler.emit(self, record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        """Raise the error of a full disk to emit(); logging would print it with every record."""
        if isinstance(error := sys.exc_info()[1], OSError) and error.errno in DISK_ERRORS:
            raise error
        super().handleError(record)

    def close(self) -> None:
        self._switch.close(lambda: logging.FileHandler.close(self))


def _log_to(path: Path) -> logging.FileHandler:
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("oktopk").addHandler(handler)
    return handler
