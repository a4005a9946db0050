"""Every workload trains on its embedded data, through the dense warm-up into the sparse phase."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from oktopk.comm import Communicator, run_threads
from oktopk.train.config.origins import resolve
from oktopk.train.launch import RankInfo
from oktopk.train.run import Outcome, train_rank
from oktopk.train.stop import Stop
from oktopk.train.tasks import WORKLOADS

pytestmark = pytest.mark.timeout(600)

WORLD = {
    "lstman4": None,  # tests/cli/test_train_on_processes.py trains it, as its user does
    "lstman4-small": 2,
    "lstm": None,  # as lstm-small, and larger; so are the next ones that are left out
    "lstm-small": 3,
    "vgg16": 2,
    "resnet20": 3,
    "resnet56": 2,
    "resnet110": 1,
    "resnet50": 1,
    "alexnet": 1,
    "bert-base": None,
    "bert-tiny": 2,
    "gpt": None,
    "gpt-small": 2,
    "gpt2": None,
}
"""Ranks for each workload: several for the small ones."""
STEPS = {"alexnet": (1, 2)}
STEPS |= dict.fromkeys(("vgg16", "resnet56", "resnet110", "resnet50", "gpt-small"), (2, 4))
"""Dense and sparse ones, where a step takes long; 5 and 15 elsewhere."""
LR = {"bert-tiny": 1e-4, "gpt-small": 1e-3}


def test_every_workload_is_here() -> None:
    assert WORLD.keys() == WORKLOADS.keys()


@pytest.mark.parametrize(("dnn", "world"), [(dnn, world) for dnn, world in WORLD.items() if world])
def test_steps_of_which_most_are_sparse(dnn: str, world: int, tmp_path: Path) -> None:
    dense, sparse = STEPS.get(dnn, (5, 15))
    given = {"dnn": dnn, "out": tmp_path / "run", "batch_size": 2}
    given |= {"max_steps": dense + sparse, "warmup_steps": dense}
    resolved = resolve({**given, "lr": LR.get(dnn, 0.01)}, {})

    def job(comm: Communicator) -> Outcome:
        return train_rank(resolved, RankInfo("test", comm.rank, comm.world), comm, Stop())

    outcomes = run_threads(world, job, timeout=300)
    assert [outcome.code for outcome in outcomes] == [0] * world
    result = outcomes[0].result
    assert {phase: row["steps"] for phase, row in result["phases"].items()} == {"dense": dense, "sparse": sparse}
    assert result["phases"]["sparse"]["skipped"] == 0
    assert 0.98 < result["phases"]["sparse"]["sparsity"] < 0.995
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in steps if line["event"] == "train"]
    assert len(losses) == dense + sparse
    assert all(math.isfinite(loss) for loss in losses)
    assert math.isfinite(result["validations"][-1]["val loss"])
    assert result["metric"] in result["validations"][-1]
