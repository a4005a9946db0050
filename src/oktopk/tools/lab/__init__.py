"""A small cluster on one machine: hosts in network namespaces, joined by links of a chosen rate.

      host 0            host 1            host 2        a namespace each
      10.77.0.1         10.77.0.2         10.77.0.3
      eth0 | tbf        eth0 | tbf        eth0 | tbf    limits what the host sends
           |                 |                 |
      tbf  | p0         tbf  | p1         tbf  | p2     limits what it receives
    ------------------------------------------------    a bridge, in a namespace of its own

Nothing is attached to the namespace of the machine, so no packet gets in or out. A namespace is named after the
process that owns it: what a killed owner leaves behind is removed by the next lab.
"""

from .hosts import Counters, Lab, lab_problem, parse_rate
from .job import Job, JobFailed, JobTimeout, RankResult
from .namespaces import LabError

__all__ = [
    "Counters",
    "Job",
    "JobFailed",
    "JobTimeout",
    "Lab",
    "LabError",
    "RankResult",
    "lab_problem",
    "parse_rate",
]
