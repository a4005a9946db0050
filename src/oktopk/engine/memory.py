"""Memory that processes of one host share: a file that has a name only until everybody has opened it."""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CommError

_FOLDER = Path("/dev/shm")


@contextmanager
def created(size: int) -> Iterator[tuple[str, Tensor]]:
    """(path, new memory of so many bytes); within the block others can open it by that path."""
    path = (_FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())) / f"oktopk-{uuid.uuid4().hex}"
    try:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, size)  # a page that turns out to be missing would end the process
                memory = _mapped(file, size)
            finally:
                os.close(file)
        except OSError as error:
            raise CommError(
                f"ranks_per_host needs {size:,} bytes of shared memory in {path.parent}, which cannot be had: "
                f"{error}; make it larger (docker run --shm-size), or take ranks_per_host=1"
            ) from error
        yield str(path), memory
    finally:
        path.unlink(missing_ok=True)


def opened(path: str, size: int, otherwise: str) -> Tensor:
    """Memory that another process has created; `otherwise` says what is wrong if it cannot be opened."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise CommError(
            f"{otherwise}: {error}; ranks must be numbered host by host, ranks_per_host of them on each"
        ) from error
    try:
        return _mapped(file, size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
