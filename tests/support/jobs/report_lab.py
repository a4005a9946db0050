"""One rank of a short training for tests/tools/report/test_lab.py.

`python -m tests.support.jobs.report_lab FOLDER` writes what its meter has counted in reductions beside the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import SGD

from oktopk.cli import main
from oktopk.comm import Communicator, Metered
from oktopk.engine.async_reducer import AsyncReducer
from oktopk.metrics.traffic import Operation, Traffic
from oktopk.train.tasks import WORKLOADS, Workload
from oktopk.train.tasks.schedules import exponential_decay
from tests.support.train import runs
from tests.support.worlds import wait_until

HIDDEN = 100_000
"""A million parameters that cost next to no computation."""
WARMUP, DENSITY, STEPS = 1, 0.05, 15
PAUSES = (2, 14)
"""Before these steps all ranks wait, until somebody has looked at what they have sent so far."""
PATIENCE = 250
"""Seconds; a busy machine is not a bug."""


def watched() -> dict[Operation, Traffic]:
    """Fills with what meters count. What the training loop has to say besides reductions goes around them."""
    counted: dict[Operation, Traffic] = {}
    take, run = Metered.pop_traffic, AsyncReducer.run

    def noted(meter: Metered) -> dict[Operation, Traffic]:
        taken = take(meter)
        for operation, moved in taken.items():
            counted[operation] = counted.get(operation, Traffic()) + moved
        return taken

    def around(reducer: AsyncReducer, job: Callable[[Communicator], Any], **options: bool) -> Any:
        return run(reducer, lambda meter: job(meter.inner if isinstance(meter, Metered) else meter), **options)

    Metered.pop_traffic, AsyncReducer.run = noted, around  # type: ignore[method-assign]
    return counted


def dump(counted: dict[Operation, Traffic], path: Path) -> None:
    """All at once: somebody waits for the file."""
    kinds = [
        {
            "kind": [operation.name, operation.phase, operation.control],
            "bytes": moved.sent_bytes,
            "messages": moved.sent_messages,
            "sizes": moved.sizes,
        }
        for operation, moved in counted.items()
    ]
    path.with_suffix(".new").write_text(json.dumps(kinds))
    path.with_suffix(".new").rename(path)


def metered_file(folder: Path, rank: int, step: int) -> Path:
    return folder / f"metered-{rank}-{step}.json"


def train(folder: Path, counted: dict[Operation, Traffic]) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def pause(_: runs.Regression, batch: runs.Batch) -> None:
        if batch.step == 0:
            counted.clear()  # of the rehearsal, between threads of this process
        if batch.step in PAUSES:
            dump(counted, metered_file(folder, rank, batch.step))
            assert wait_until((folder / f"go-{batch.step}").exists, PATIENCE)

    runs.HIDDEN = HIDDEN
    recipe = runs.Recipe(STEPS * world * runs.BATCH, batch_norm=False, carries=False, before=pause)
    WORKLOADS["toy"] = Workload(
        *("toy", "numbers", lambda source, share: runs.built(recipe, share)),
        runs.BATCH,
        1,
        exponential_decay(1.01),
        SGD,
    )
    words = ["--dnn", "toy", "--out", str(folder), "--lr", "1e-9", "--max-epochs", "1", "--timeout", str(PATIENCE)]
    code = main(["train", *words, "--warmup-steps", str(WARMUP), "--density", str(DENSITY)])
    dump(counted, metered_file(folder, rank, STEPS))
    return code


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), watched()))
