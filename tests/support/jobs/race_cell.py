"""The job of a race's cell, with a workload so small that a step takes milliseconds, and a step at which to fail.

python race_cell.py [--fail CONTENDER STEP] FOLDER
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

from oktopk.tools.race import job, loop
from oktopk.train.models.gpt import Size
from oktopk.train.tasks import WORKLOADS, Workload
from oktopk.train.tasks.gpt import GPTTask

TINY = "gpt-tiny"
SIZE = Size(layers=1, width=16, heads=2, context=64, dropout=0.1)


def tiny_workload() -> Workload:
    return replace(WORKLOADS["gpt-small"], dnn=TINY, build=partial(GPTTask, SIZE), batch_size=4)


class FailingLoop(loop.CellLoop):
    """Fails on all ranks after a step."""

    contender_name, step = "", -1

    def _step_and_judge(self, batches: object) -> str | None:
        ended = super()._step_and_judge(batches)  # type: ignore[arg-type]
        if self.done.step == self.step and self.spec.cell.contender == self.contender_name:
            raise RuntimeError(f"asked to fail after step {self.step}")
        return ended


if __name__ == "__main__":
    WORKLOADS[TINY] = tiny_workload()
    if sys.argv[1] == "--fail":
        FailingLoop.contender_name, FailingLoop.step = sys.argv[2], int(sys.argv[3])
        job.CellLoop = FailingLoop  # type: ignore[misc]
    job.main(sys.argv[-1])
    sys.stdout.flush()
    os._exit(0)
