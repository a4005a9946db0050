"""The MPI library that mpi4py has found. Run as a program, this file prints it without starting MPI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

SECONDS = 60
"""For a look at the library, whatever --timeout says: that is for ranks that wait for each other."""


def mpi() -> dict[str, Any] | None:
    """Of this process, if it is a rank of MPI. Otherwise another process has a look: a library that does not fit
    may end it, and here MPI must stay as it is for whoever starts it later."""
    if "mpi4py.MPI" in sys.modules:
        return library()
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        late = f"mpi4py has not told its library within {SECONDS} s: the machine is very busy, or MPI hangs"
        raise RuntimeError(f"{late}; see what happens by: python -c 'from mpi4py import MPI'") from error
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or f"mpi4py ends with code {done.returncode}").splitlines()[-1])
    found: dict[str, Any] | None = json.loads(done.stdout)
    return found


def library() -> dict[str, Any] | None:
    """None without mpi4py. `size` is that of the world, if MPI has been started."""
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
    print(json.dumps(library()))


if __name__ == "__main__":
    _main()
