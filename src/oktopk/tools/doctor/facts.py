"""Facts about one rank: versions, packages, backends, MPI, threads, kernels, and the output folder."""

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
from oktopk.tools.cores import available_cores
from oktopk.utils.extras import packages

from .findings import Unknown, collect_fact
from .kernels import check_kernels
from .mpi import find_mpi


def local_facts(data: Callable[[], Any] | None) -> dict[str, Any]:
    """Collect all facts about this rank; `data` loads the user's data and returns {"data", "problems",
    "parameters"}.
    """
    topics: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "extras": missing_packages,
        "backends": backends,
        "mpi": find_mpi,
        "threads": threads,
        "kernels": check_kernels,
        "data": data or (lambda: None),
    }
    return {topic: collect_fact(collect) for topic, collect in topics.items()}


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
    """The packages that are not installed, by extra."""
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
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def probe_output(out: Path) -> Iterator[Any]:
    """Create a file in the output folder for the duration of the block, to test writing and sharing."""
    with ExitStack() as stack:
        yield collect_fact(lambda: _create_probe(out, stack))


def _create_probe(out: Path, stack: ExitStack) -> dict[str, Any]:
    folder = _existing_folder(out)
    try:
        file = stack.enter_context(NamedTemporaryFile(prefix=".oktopk-doctor-", dir=folder))  # noqa: SIM115
    except OSError as error:
        raise Unknown(f"{folder} is not writable: {error.strerror}") from error
    free = shutil.disk_usage(folder).free
    return {"folder": str(folder), "file": Path(file.name).name, "free_bytes": free}


def is_visible(out: Path, name: str) -> bool:
    return (_existing_folder(out) / name).exists()


def _existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
