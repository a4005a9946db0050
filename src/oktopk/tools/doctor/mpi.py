"""Find the MPI library of mpi4py. As a program, this file prints it without initialising MPI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

SECONDS = 60
"""Time limit for loading the library; --timeout only limits the waiting for other ranks."""


def find_mpi() -> dict[str, Any] | None:
    """Describe the MPI library of this process, or load it in another process if this is not an MPI rank.

    A mismatched library can kill its process, and importing MPI here would initialise it.
    """
    if "mpi4py.MPI" in sys.modules:
        return describe_library()
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        late = f"mpi4py did not load within {SECONDS} s: the machine is very busy, or MPI hangs"
        raise RuntimeError(f"{late}; try: python -c 'from mpi4py import MPI'") from error
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or f"mpi4py exits with code {done.returncode}").splitlines()[-1])
    found: dict[str, Any] | None = json.loads(done.stdout)
    return found


def describe_library() -> dict[str, Any] | None:
    """Describe the library; None without mpi4py. `size` is the world size if MPI is initialised."""
    try:
        import mpi4py
    except ImportError:
        return None
    from mpi4py import MPI

    lines = MPI.Get_library_version().strip("\0\n").splitlines()
    name, version = MPI.get_vendor()
    started = MPI.Is_initialized() and not MPI.Is_finalized()
    return {
        "mpi4py": mpi4py.__version__,
        "library": re.sub(r"\s+", " ", lines[0]).replace("Version: ", ""),
        "built_for": f"{name} {'.'.join(map(str, version))}",
        "abi": next((line.split(":", 1)[1].strip() for line in lines if "ABI" in line), None),
        "size": MPI.COMM_WORLD.Get_size() if started else None,
    }


def _main() -> None:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
    except ImportError:
        pass
    print(json.dumps(describe_library()))


if __name__ == "__main__":
    _main()
