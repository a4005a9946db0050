"""Metrics in runs of wandb and MLflow, offline: every step is there, with the figures that the library has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import oktopk
from oktopk.metrics.sinks import MemorySink
from oktopk.metrics.sinks.tensorboard import step_scalars

pytestmark = pytest.mark.filterwarnings("ignore")  # of other projects
STEPS = 60
"""More than MLflow takes in one request."""


def reduce(*sinks: oktopk.MetricsSink) -> dict[str, list[float]]:
    """Average gradients some times; the curves that sinks should have now."""
    memory = MemorySink()
    weights = torch.nn.Parameter(torch.zeros(200))
    settings = {"density": 0.1, "warmup_steps": 4, "auto": False, "sinks": [memory, *sinks]}
    with oktopk.AllReducer([("w", weights)], **settings) as reducer:
        for step in range(STEPS):
            reducer.sync({"w": torch.randn(200, generator=torch.Generator().manual_seed(step))})
    rows = [step_scalars(event) for event in memory.steps]
    return {f"oktopk/{name}": [float(row[name]) for row in rows if row[name] is not None] for name in rows[0]}


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run: a log as LevelDB has it, blocks of 32 kB, at whose ends records are cut."""
    block, header, kinds = 1 << 15, 7, range(1, 5)
    at, record = header, b""  # the file begins with a header of its own, of the same length
    while at + header <= len(content):
        if block - at % block < header:  # padding
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        assert kind in kinds, f"{kind} at byte {at}"
        record += content[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


class TestWandb:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[object]:
        import wandb

        with wandb.init(project="oktopk", dir=tmp_path) as run:
            yield run

    def test_every_step_is_in_the_file_of_the_run(self, tmp_path: Path) -> None:
        import wandb
        from wandb.proto import wandb_internal_pb2

        from oktopk.integrations.wandb import WandbSink

        with wandb.init(project="oktopk", dir=tmp_path):
            expected = reduce(WandbSink())
        wandb.teardown()  # waits for the process that writes
        (file,) = tmp_path.rglob("*.wandb")
        rows = []
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
        ours = [row for row in rows if "oktopk/step" in row]
        assert [int(row["oktopk/step"]) for row in ours] == list(range(STEPS))
        for name, values in expected.items():
            assert [float(row[name]) for row in ours if name in row] == pytest.approx(values), name
        assert [int(float(row["oktopk/state/sparse_phase"])) for row in ours] == [0] * 4 + [1] * (STEPS - 4)

    def test_the_script_keeps_its_own_steps(self, run: object) -> None:
        """With commit=False, no call of the sink counts as a step of wandb."""
        from oktopk.integrations.wandb import WandbSink

        reduce(WandbSink(run, commit=False))
        assert run.step == 0
        reduce(WandbSink(run, every=20))
        assert run.step == 3

    def test_without_a_run_the_error_says_what_to_do(self) -> None:
        from oktopk.integrations.wandb import WandbSink

        with pytest.raises(oktopk.OkTopkError, match=r"WandbSink has no run: call wandb.init\(\) before"):
            reduce(WandbSink())


class TestMlflow:
    @pytest.fixture(autouse=True)
    def database(self, tmp_path: Path) -> None:
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")

    def test_every_step_is_in_the_database(self) -> None:
        import mlflow

        from oktopk.integrations.mlflow import MlflowSink

        with mlflow.start_run() as run:
            expected = reduce(MlflowSink())
            assert mlflow.active_run() is not None
        client = mlflow.MlflowClient()
        for name, values in expected.items():
            history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda metric: metric.step)
            assert [metric.value for metric in history] == pytest.approx(values), name
        assert [metric.step for metric in history] == list(range(STEPS))

    def test_a_failing_server_does_not_end_training(self, caplog: pytest.LogCaptureFixture) -> None:
        from oktopk.integrations.mlflow import MlflowSink

        with caplog.at_level(logging.WARNING, logger="oktopk"):
            reduce(MlflowSink("no-such-run"))
        (record,) = caplog.records
        assert "MlflowSink is switched off, and training continues without it: MLflow: " in record.getMessage()

    def test_without_a_run_the_error_says_what_to_do(self) -> None:
        from oktopk.integrations.mlflow import MlflowSink

        with pytest.raises(oktopk.OkTopkError, match=r"MlflowSink has no run: call mlflow.start_run\(\) before"):
            reduce(MlflowSink())
