"""α and β of a link that exists, over connections like those of training: all ranks send to the next at once."""

from __future__ import annotations

import json
import sys
import tempfile

from oktopk.tools.lab import Lab

from ..network import Network
from .processes import run_all

_TIMEOUT = 300.0
_MODULE = "oktopk.tools.simulate.measure.shifts"


def calibrate_lab(rate: str | None, ranks: int = 2) -> Network:
    """Of hosts in network namespaces with links of this rate; needs root."""
    with Lab(ranks, rate) as lab:
        return in_lab(lab)


def in_lab(lab: Lab) -> Network:
    """Of a lab that is there."""
    return _read(lab.run([sys.executable, "-m", _MODULE], timeout=_TIMEOUT)[0].stdout)


def calibrate_loopback(ranks: int = 2) -> Network:
    """Of this machine's loopback."""
    with tempfile.TemporaryDirectory(prefix="oktopk-") as folder:
        shared = {
            "WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            "OKTOPK_MEETING": f"file://{folder}/meeting",
        }
        environments = [{**shared, "RANK": str(rank)} for rank in range(ranks)]
        return _read(run_all(_MODULE, [], environments, _TIMEOUT)[0])


def _read(said: str) -> Network:
    return Network(**json.loads(said))
