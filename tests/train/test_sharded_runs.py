"""Runs with --shard on 2 x 2 processes: what they compute, save, resume and refuse."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.tools.report import build_report, read_run
from oktopk.train.checkpoint.snapshot import CheckpointError
from oktopk.train.config.options import ConfigError
from oktopk.train.config.origins import resolve
from oktopk.train.config.plan import Plan
from oktopk.train.launch import RankInfo
from oktopk.train.models.gpt import Size
from oktopk.train.run import train_rank
from oktopk.train.stop import Stop
from oktopk.train.tasks import WORKLOADS, Tally, Workload
from oktopk.train.tasks.gpt import GPTTask, _adamw
from oktopk.train.tasks.schedules import constant_after_warmup
from tests.support import worlds
from tests.support.train.runs import Runs, assert_same

pytestmark = pytest.mark.timeout(300)

SIZE = Size(layers=2, width=15, heads=3, context=16, dropout=0.1)
TEXT = "a small text that is sharded, and sent in small parts. " * 30
OPTIONS: dict[str, Any] = {
    "dnn": "tiny", "shard": 2, "density": 0.1, "warmup_steps": 2, "max_steps": 7, "batch_size": 2, "lr": 0.01,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {"clip": 0.5, "nsteps_update": 2},
    "updates": {"average": "updates", "clip": 0.5},
    "clipped before": {"norm_clip": 0.5, "values": "bf16"},
}


class Uneven(GPTTask):
    """Ranks do not validate on equally many batches."""

    def validate(self) -> Tally:
        for _ in range(self._share.rank):
            self.model(torch.zeros(1, 4, dtype=torch.int64))
        return super().validate()


Train = Callable[..., dict[str, Any]]


def trains(connect: Callable[..., Any], folder: Path) -> Train:
    """train(name, …) is one run on the ranks of this world, and returns its result."""
    comm, info = connect(timeout=60), RankInfo("test", dist.get_rank(), dist.get_world_size())
    WORKLOADS["tiny"] = Workload(  # type: ignore[index]
        dnn="tiny", dataset="tokens", build=partial(Uneven, SIZE), batch_size=2, max_epochs=3,
        schedule=constant_after_warmup(2), optimizer=_adamw, momentum=None, weight_decay=0.1, clip=1.0,
    )  # fmt: skip

    def train(name: str, resume: bool = False, **options: Any) -> dict[str, Any]:
        given = {**OPTIONS, "data_dir": folder, "out": folder / name, **options}
        given = {key: value for key, value in given.items() if value is not None}
        return train_rank(resolve(given, {}), info, comm, Stop(), resume).result

    return train


def refusal(train: Train, *names: str, **options: Any) -> str:
    try:
        train(*names, **options)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return "nothing was refused"


def on_four(connect: Callable[..., Any], folder: Path) -> dict[str, Any]:
    logging.getLogger("oktopk").setLevel(logging.ERROR)
    train, found = trains(connect, folder), {}
    for name, options in WAYS.items():
        found[f"whole {name}"] = train(f"whole {name}", **options)
        train(f"cut {name}", **options | {"max_steps": 4})
        found[f"cut {name}"] = train(f"cut {name}", resume=True, **options)
    for shard in (1, 2, 4):
        dense = {"compression": False, "weight_decay": 0.0, "clip": 0.5, "shard": shard}
        found[f"dense {shard}"] = train(f"dense {shard}", **dense)
    found["refused"] = [
        refusal(train, "refused", shard=3),
        refusal(train, "refused", ranks_per_host=2),
        refusal(train, "cut gradients", resume=True, max_steps=9, shard=4, **WAYS["gradients"]),
        refusal(train, "cut gradients", resume=True, max_steps=9, shard=1, **WAYS["gradients"]),
    ]
    return found


def on_two(connect: Callable[..., Any], folder: Path) -> dict[str, Any]:
    logging.getLogger("oktopk").setLevel(logging.ERROR)
    train = trains(connect, folder)
    return {
        "resumed": refusal(train, "cut gradients", resume=True, max_steps=9, **WAYS["gradients"]),
        "started": train("started", shard=1, pretrain=folder / "whole gradients", max_steps=1, lr=1e-9),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "input.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Any]:
    """What rank 0 has found; the others have found the same."""
    every = worlds.run("gloo", 4, on_four, folder, timeout=240)
    for rank in every:
        for name in ("dense 2", "whole updates"):
            assert rank[name]["validations"] == every[0][name]["validations"]
        assert rank["refused"] == every[0]["refused"]
    return every[0]  # type: ignore[no-any-return]


def saved(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    records = (manifest["shared"], *manifest["ranks"])
    return {
        record["name"].split(".")[0]: torch.load(newest / record["name"], weights_only=True) for record in records
    }


def weights(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = saved(run)["shared"]["parameters"]
    return found


def test_runs_are_dense_at_first_and_sparse_then(ran: dict[str, Any]) -> None:
    for name in WAYS:
        phases = ran[f"whole {name}"]["phases"]
        assert {phase: row["steps"] for phase, row in phases.items()} == {"dense": 2, "sparse": 5}
        assert not any(row["skipped"] for row in phases.values())
        assert phases["sparse"]["sent_bytes"] < phases["dense"]["sent_bytes"] / 2
        validations = [row["val loss"] for row in ran[f"whole {name}"]["validations"]]
        assert validations[-1] < 3.2, "ln 25 characters, if nothing was learnt"


def test_sharded_runs_compute_what_others_do(ran: dict[str, Any], folder: Path) -> None:
    plain = weights(folder / "dense 1")
    for shard in (2, 4):
        torch.testing.assert_close(weights(folder / f"dense {shard}"), plain, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", WAYS)
def test_a_resumed_run_goes_on_to_the_bit(name: str, ran: dict[str, Any], folder: Path) -> None:
    whole, cut = (saved(folder / f"{kind} {name}") for kind in ("whole", "cut"))
    assert_same(whole["shared"]["parameters"], cut["shared"]["parameters"])
    for rank in range(4):
        for part in ("optimizer", "buffers", "random", "task"):
            assert_same(whole[f"rank-{rank:04d}"][part], cut[f"rank-{rank:04d}"][part])
    assert ran[f"whole {name}"]["schedule"] == ran[f"cut {name}"]["schedule"]


def test_every_rank_saves_its_shards_alone(ran: dict[str, Any], folder: Path) -> None:
    found = saved(folder / "whole gradients")
    entries = sum(parameter.numel() for parameter in found["shared"]["parameters"].values())
    for rank in range(4):
        moments = found[f"rank-{rank:04d}"]["optimizer"]["state"].values()
        own = sum(moment["exp_avg"].numel() for moment in moments)
        assert 0.4 * entries < own < 0.6 * entries
    assert "optimizer" not in found["shared"]


def test_the_report_reads_a_sharded_run(ran: dict[str, Any], folder: Path) -> None:
    report = build_report([read_run(folder / "whole gradients", "sharded")])
    (run,) = report["runs"]
    assert not run["notes"]
    assert run["plan"]["shard"] == 2


def test_another_mesh_is_refused_with_the_remedy(ran: dict[str, Any], folder: Path) -> None:
    uneven, hosts, wider, alone = ran["refused"]
    assert uneven == "--shard is 3, but the number of ranks, 4, is no multiple of it"
    assert "leave out --ranks-per-host" in hosts
    assert "it was saved with --shard 2, this run has --shard 4; its weights can be used: --pretrain RUN" in wider
    assert "it was saved with --shard 2, this run has --shard 1" in alone
    for rank in worlds.run("gloo", 2, on_two, folder, timeout=120):
        assert "was saved by 4 ranks with --shard 2, here are 2: resume with as many" in rank["resumed"]
        assert rank["started"]["finished"]
    torch.testing.assert_close(weights(folder / "started"), weights(folder / "whole gradients"))


def test_shards_need_torch_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Runs(tmp_path, monkeypatch)(world=2, shard=2)
    for said in ran.errors(ConfigError):
        assert said == "--shard needs torch.distributed, which test does not start: use --ranks or torchrun"


def test_the_plan_counts_the_bytes_of_shards() -> None:
    plan = Plan(10, 1, None, 2, "oktopk", 0.01, 4_000_000, world=4, shard=2)
    assert plan.dense_bytes == 8_000_000
    assert plan.volume() == [
        "a dense step: 8,000,000 bytes of gradient; a rank sends 8,000,000 (ring)",
        "a sparse step at density 0.01: 160,000 bytes for 20,000 entries; a rank sends less than 240,000 on "
        "average (6k words)",
        "2 replicas, each sharded over 2 ranks",
    ]
    one = Plan(10, 1, None, 2, "dense", 0.01, 4_000_000, world=4, shard=4).volume()
    assert one[0] == "a dense step: 4,000,000 bytes of gradient; a single replica sends nothing"
