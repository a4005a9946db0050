"""oktopk doctor: is this machine, or this world of ranks, fit to train on, and does compression pay there?

facts.py, kernels.py, mpi.py
                       what a rank tells of itself: plain data
links.py, pays.py      what ranks measure together
checks.py, speed.py    a check is a function from the world that was told to one finding
together.py            all of it, on all ranks
"""

from __future__ import annotations

from .checks import CHECKS
from .findings import OK, PROBLEM, WARNING, Asked, Finding, World, exit_code, judged, rendered
from .together import Data, examine, examine_alone

__all__ = [
    "CHECKS",
    "OK",
    "PROBLEM",
    "WARNING",
    "Asked",
    "Data",
    "Finding",
    "World",
    "examine",
    "examine_alone",
    "exit_code",
    "judged",
    "rendered",
]
