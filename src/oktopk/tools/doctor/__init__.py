"""oktopk doctor: can this machine, or this job, train, and is compression faster there?

facts.py, kernels.py, mpi.py     facts about one rank, as plain data
links.py, step_times.py          what all ranks measure together
prediction.py                    whole steps of the model at a link, and the rate below which compression wins
checks.py, speed_checks.py       checks: functions from the World of all facts to one Finding
examination.py                   gathers facts and measurements from all ranks
gpu.py, gpu_jobs.py              --gpu: checks of the GPU path, and the processes that they start
"""

from __future__ import annotations

from .checks import CHECKS
from .examination import Data, examine, examine_alone
from .findings import OK, PROBLEM, WARNING, Finding, Request, World, exit_code, format_findings, run_checks
from .gpu import GPU_CHECKS

__all__ = [
    "CHECKS",
    "GPU_CHECKS",
    "OK",
    "PROBLEM",
    "WARNING",
    "Data",
    "Finding",
    "Request",
    "World",
    "examine",
    "examine_alone",
    "exit_code",
    "format_findings",
    "run_checks",
]
