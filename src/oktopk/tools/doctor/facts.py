"""What a rank can tell of itself: versions, packages, backends, MPI, threads, kernels, and where runs go."""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist

import oktopk
from oktopk.tools.cores import own_cores
from oktopk.utils.extras import packages

from .findings import Unknown, looked_into
from .kernels import kernels
from .mpi import mpi


def local_facts(data: Callable[[], Any] | None) -> dict[str, Any]:
    """`data` looks at the user's data and tells {"data", "problems", "parameters"}."""
    topics: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "extras": missing_packages,
        "backends": backends,
        "mpi": mpi,
        "threads": threads,
        "kernels": kernels,
        "data": data or (lambda: None),
    }
    return {topic: looked_into(look) for topic, look in topics.items()}


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "oktopk": oktopk.__version__,
        "numpy": _version("numpy"),
        "numba": _version("numba"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_packages() -> dict[str, list[str]]:
    """By extra: those of its packages that are not installed."""
    return {
        extra: [package for package in inside if _version(package) is None] for extra, inside in packages().items()
    }


def backends() -> dict[str, Any]:
    available = dist.is_available()
    return {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
        "mpi": available and dist.is_mpi_available(),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def threads() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "cores": own_cores(),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def footprint(out: Path) -> Iterator[Any]:
    """A file where a run would be written, for as long as the block takes: can this rank write there, and do the
    others see it?"""
    with ExitStack() as stack:
        yield looked_into(lambda: _left(out, stack))


def _left(out: Path, stack: ExitStack) -> dict[str, Any]:
    folder = _nearest(out)
    try:
        file = stack.enter_context(NamedTemporaryFile(prefix=".oktopk-doctor-", dir=folder))  # noqa: SIM115
    except OSError as error:
        raise Unknown(f"{folder} cannot be written to: {error.strerror}") from error
    free = shutil.disk_usage(folder).free
    return {"folder": str(folder), "file": Path(file.name).name, "free_bytes": free}


def sees(out: Path, name: str) -> bool:
    return (_nearest(out) / name).exists()


def _nearest(path: Path) -> Path:
    """The folder itself, or the one that exists already and that it would be made in."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
