"""The folder of a run: what it was told, what happened, and where it can go on.

config.toml      every option with its origin; --config takes it
plan.json        what it will do: steps, warm-up, bytes to be expected
metrics.jsonl    a line for each reduction, step, epoch and validation
timing.csv       a row for each step: where its time went
events.out.…     the same for TensorBoard
result.json      the figures at the end
train.log        what the screen has shown
checkpoints/     to go on from
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from oktopk.metrics.events import MetricsSink
from oktopk.metrics.sinks import JSONLSink, TensorBoardSink
from oktopk.metrics.sinks.flat import Row, finite
from oktopk.utils.files import atomic_path, make_folder, remove_drafts, write_atomically

from .config.options import ConfigError, TrainConfig
from .config.origins import Resolved, as_toml
from .figures import StepFigures

CONFIG, PLAN, RESULT, CHECKPOINTS = "config.toml", "plan.json", "result.json", "checkpoints"
METRICS, TIMING = "metrics.jsonl", "timing.csv"
_FROM_REDUCER = (
    *("select_seconds", "encode_seconds", "exchange_seconds", "decode_seconds", "wait_seconds"),
    *("other_seconds", "hidden_share", "sent_bytes", "received_bytes"),
)


def new_name(config: TrainConfig) -> str:
    """For a run that was given no folder: what it is, and when it began."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    density = "" if config.algorithm == "dense" else f"-{config.density:g}"
    return f"{config.dnn}-{config.algorithm}{density}-seed{config.seed}-{now}"


def check_unused(folder: Path) -> None:
    """A run is never written over another one."""
    if (folder / CONFIG).exists():
        raise ConfigError(f"{folder} holds a run: go on with it by --resume {folder}, or give another --out")


class RunFolder:
    """Written by rank 0; other ranks have a folder for checkpoints only.

    Metrics are opened when it is known at which step the run goes on: what was written of later steps, by a
    run that ended without saving them, is taken away.
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.path, self._writes = path, writes
        self.checkpoints = path / CHECKPOINTS
        self._lines: JSONLSink | None = None
        self._board: TensorBoardSink | None = None
        self._timing: Timing | None = None
        self._log: logging.FileHandler | None = None
        if writes:
            make_folder(path)
            for name in (CONFIG, PLAN, RESULT, METRICS, TIMING):
                remove_drafts(path / name)
            self._log = _log_to(path / "train.log")

    def open_metrics(self, step: int) -> list[MetricsSink]:
        """From this step on; what the reducer is to tell about its steps."""
        if not self._writes:
            return []
        _rewind_lines(self.path / METRICS, step)
        _rewind_table(self.path / TIMING, step)
        self._lines = JSONLSink(self.path / METRICS)
        self._board = TensorBoardSink(self.path, first_step=step)
        self._timing = Timing(self.path / TIMING)
        return [self._lines, self._board]

    def write_config(self, resolved: Resolved) -> None:
        if self._writes:
            write_atomically(self.path / CONFIG, as_toml(resolved).encode())

    def step(self, figures: StepFigures, event: Row) -> None:
        """`event` is what the reducer says of the step, by flat_step."""
        if self._lines is None or self._board is None or self._timing is None:
            return
        row = {name: value for name, value in asdict(figures).items() if name != "step"}
        self.record("train", figures.step, row)
        self._timing.write(figures, event)

    def record(self, kind: str, step: int, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, and its numbers as curves "kind/name"."""
        if self._lines is None or self._board is None:
            return
        clean = {name: finite(value) for name, value in row.items()}
        self._lines.add(kind, step, clean)
        numbers = {f"{kind}/{name}": x for name, x in clean.items() if isinstance(x, (int, float))}
        self._board.add(step, numbers)

    def plan(self, row: Mapping[str, Any]) -> None:
        self._write_json(PLAN, row)

    def result(self, row: Mapping[str, Any]) -> None:
        self._write_json(RESULT, row)

    def _write_json(self, name: str, row: Mapping[str, Any]) -> None:
        if self._writes:
            text = json.dumps(finite(row), indent=2, allow_nan=False) + "\n"
            write_atomically(self.path / name, text.encode())

    def no_result(self) -> None:
        """The run goes on: what it had come to before is no longer its result."""
        if self._writes:
            (self.path / RESULT).unlink(missing_ok=True)

    def close(self) -> None:
        """Everything, even if a part of it cannot be closed, on a full disk for one."""
        with ExitStack() as parts:
            if self._log is not None:
                parts.callback(self._log.close)
                parts.callback(logging.getLogger("oktopk").removeHandler, self._log)
            for part in (self._lines, self._board, self._timing):
                if part is not None:
                    parts.callback(part.close)


class Timing:
    """timing.csv; an existing file is continued."""

    def __init__(self, path: Path) -> None:
        own = [item.name for item in fields(StepFigures)]
        self._names, self._path = [*own, *_FROM_REDUCER], path
        fresh = not path.exists() or path.stat().st_size == 0
        self._file = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - close() closes it
        self._writer = csv.writer(self._file, lineterminator="\n")
        if fresh:
            self._writer.writerow(self._names)

    def write(self, figures: StepFigures, event: Row) -> None:
        known = {**event, **asdict(figures)}
        try:
            self._writer.writerow([known[name] for name in self._names])
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def _rewind_lines(path: Path, step: int) -> None:
    """Without the lines of this step and later ones; those of epochs and validations say how many are done."""

    def stays(line: bytes) -> bool:
        try:
            row = json.loads(line)
            return bool(row["step"] < step + (row["event"] in ("epoch", "validation")))
        except (ValueError, KeyError, TypeError):
            return False

    _keep_lines(path, stays)


def _rewind_table(path: Path, step: int) -> None:
    def stays(line: bytes) -> bool:
        number = line.partition(b",")[0]
        return number == b"step" or (number.isdigit() and int(number) < step and line.endswith(b"\n"))

    _keep_lines(path, stays)


def _keep_lines(path: Path, stays: Callable[[bytes], bool]) -> None:
    """Rewrite a file without some of its lines; one that has none of them is left as it is."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        if all(map(stays, file)):
            return
    with open(path, "rb") as file, atomic_path(path) as draft, open(draft, "wb") as kept:
        kept.writelines(line for line in file if stays(line))


def _log_to(path: Path) -> logging.FileHandler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("oktopk").addHandler(handler)
    return handler
