"""Measure α and β of a real link, over the same connections as training: all ranks send to the next at once."""

from __future__ import annotations

import json
import sys
import tempfile

from oktopk.tools.lab import Lab
from oktopk.utils.secret import SECRET, new_secret

from ..network import Network
from .processes import run_all

_TIMEOUT = 300.0
_MODULE = "oktopk.tools.simulate.measure.link_times"


def calibrate_lab(rate: str | None, ranks: int = 2) -> Network:
    """Measure between hosts in network namespaces with links of this rate."""
    with Lab(ranks, rate) as lab:
        return calibrate_in(lab)


def calibrate_in(lab: Lab) -> Network:
    """Measure in an existing lab."""
    return _parse(lab.run([sys.executable, "-m", _MODULE], timeout=_TIMEOUT)[0].stdout)


def calibrate_loopback(ranks: int = 2) -> Network:
    """Measure on loopback."""
    with tempfile.TemporaryDirectory(prefix="oktopk-") as folder:
        shared = {
            "WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            SECRET: new_secret(),
            "OKTOPK_RENDEZVOUS": f"file://{folder}/rendezvous",
        }
        environments = [{**shared, "RANK": str(rank)} for rank in range(ranks)]
        return _parse(run_all(_MODULE, [], environments, _TIMEOUT)[0])


def _parse(output: str) -> Network:
    return Network(**json.loads(output))
