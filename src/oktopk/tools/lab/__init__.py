"""A small cluster on one machine: hosts in network namespaces, connected by links of a chosen rate.

      host 0            host 1            host 2        a namespace each
      10.77.0.1         10.77.0.2         10.77.0.3
      eth0 | tbf        eth0 | tbf        eth0 | tbf    limits what the host sends
           |                 |                 |
      tbf  | p0         tbf  | p1         tbf  | p2     limits what it receives
    ------------------------------------------------    a bridge, in a namespace of its own

Without root, the commands that build a lab run themselves again in a user namespace, where the kernel allows it.

No interface is attached to the machine's own namespace, so no packet enters or leaves the lab. A namespace is
named after the process that owns it; the next lab removes what a killed owner left behind.
"""

from .hosts import MAX_HOSTS, Counters, Lab, lab_problem, parse_rate
from .job import Job, JobFailed, JobTimeout, RankResult
from .namespaces import LabError
from .user_namespace import enter_user_namespace

__all__ = [
    "MAX_HOSTS",
    "Counters",
    "Job",
    "JobFailed",
    "JobTimeout",
    "Lab",
    "LabError",
    "RankResult",
    "enter_user_namespace",
    "lab_problem",
    "parse_rate",
]
