"""The library without Numba: slower, with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# --- without Numba -------------------------------------------------------------------------------------------

NO_NUMBA = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
"""

COLLECTIVE = """
import hashlib
import torch
import oktopk

def digest(algorithm, values):
    def run(comm):
        random = torch.Generator().manual_seed(comm.rank)
        residual, state, digest = torch.zeros(3001), None, hashlib.sha256()
        for step in range(4):
            tensor = torch.randn(3001, generator=random) * torch.randn(3001, generator=random).exp()
            mean, info = oktopk.sparse_allreduce(
                tensor, 0.05, algorithm, residual, comm, values=values, state=state, step=step
            )
            state = info.state
            digest.update(mean.numpy().tobytes() + residual.numpy().tobytes())
        return digest.hexdigest()
    return oktopk.run_threads(3, run)

formats = ("fp32", "fp16", "e4m3")
digests = [[name, values, *digest(name, values)] for name in oktopk.ALGORITHMS for values in formats]
"""

TELL = """
import json
assert "numba" not in sys.modules
print(json.dumps(digests))
"""


@pytest.mark.processes
def test_the_library_is_the_same_without_numba() -> None:
    """Every algorithm, four steps with residuals on three ranks: the same bits, only slower."""
    command = [sys.executable, "-W", "error", "-c", NO_NUMBA + COLLECTIVE + TELL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    with_numba: dict[str, list[list[str]]] = {}
    exec(COLLECTIVE, with_numba)
    assert len(with_numba["digests"]) >= 12
    assert json.loads(done.stdout) == with_numba["digests"]
