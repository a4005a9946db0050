"""Shared memory as a local transport: a file that has a name only until every rank of the host has opened it."""

from __future__ import annotations

import mmap
import os
import re
import stat
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CommError, WireError
from ...feedback.buckets import Bucket
from ...metrics.traffic import Operation, Traffic
from .links import MEAN, RESULT, Entries, LocalLinks, LocalTransport

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"oktopk-[0-9a-f]{32}")
_PHASE = "host memory"


@dataclass(frozen=True)
class _Segment:
    """Memory for one bucket that the ranks of a host share."""

    mean: Tensor
    """Bytes where gradients add up."""
    result: Tensor
    """Bytes. Apart from the mean: a rank may hand in its next gradient while another one reads this."""


class SharedMemoryTransport(LocalTransport):
    """Tensors stay where they are; messages only say whose turn it is."""

    def __init__(self, links: LocalLinks, members: Sequence[int]) -> None:
        super().__init__(links)
        self._leader, *self._others = members
        self._segments: dict[Bucket, _Segment] = {}
        self._moved: Counter[str] = Counter()
        """Bytes by phase."""

    def sum_buffer(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        return self._mean(bucket, dtype)

    def send_sum(self, bucket: Bucket, total: Tensor, rank: int) -> None:
        self._moved[MEAN] += total.nbytes
        self.links.send_json("added", rank, MEAN)

    def recv_sum(self, bucket: Bucket, dtype: torch.dtype, rank: int, patience: float) -> Tensor:
        mean = self._mean(bucket, dtype)
        self.links.recv_json(rank, MEAN, patience)
        return mean

    def publish(self, outcome: Any, results: Sequence[Entries], ranks: Sequence[int]) -> None:
        for bucket, parts in results:
            start, room = 0, self._segments[bucket].result
            for part in parts:
                room[start : start + part.nbytes].view(part.dtype).copy_(part)
                start += part.nbytes
            self._moved[RESULT] += start
        for rank in ranks:
            self.links.send_json(outcome, rank, RESULT)

    def receive(self, bucket: Bucket, shapes: Sequence[tuple[int, torch.dtype]], leader: int) -> list[Tensor]:
        start, parts = 0, []
        for count, dtype in shapes:
            stop = start + count * dtype.itemsize
            parts.append(self._segments[bucket].result[start:stop].view(dtype))
            start = stop
        return parts

    def pop_traffic(self) -> dict[Operation, Traffic]:
        moved, self._moved = self._moved, Counter()
        return {Operation("shared_memory", phase): Traffic(sent_bytes=size) for phase, size in moved.items()}

    def _mean(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """All ranks of the host come here for the first time in the same step."""
        if bucket not in self._segments:
            moved = set(bucket.names)
            kept = {old: segment for old, segment in self._segments.items() if moved.isdisjoint(old.names)}
            half = -(-bucket.size * dtype.itemsize // 8) * 8
            whole = self._share(2 * half)
            self._segments = {**kept, bucket: _Segment(whole[: bucket.size * dtype.itemsize], whole[half:])}
        return self._segments[bucket].mean.view(dtype)

    def _share(self, size: int) -> Tensor:
        """So many bytes, which the leader creates and the members open."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self.links.comm.rank != self._leader:
            path = self.links.recv_json(self._leader, _PHASE)
            try:
                shared = _open(path, size)
            except FileNotFoundError as error:  # the leader deletes it when it fails
                raise CommError(
                    f"open ({_PHASE}): rank {self._leader} has failed before this rank could open its memory, or "
                    f"somebody has deleted {path}"
                ) from error
            self.links.send_json("opened", self._leader, _PHASE)
            return shared
        with ExitStack() as stack:
            try:
                path, shared = stack.enter_context(_create(size))
            except OSError as error:
                raise CommError(
                    f"ranks_per_host needs {size:,} bytes of shared memory in {_folder()}: {error}. Make it "
                    "larger (docker run --shm-size), or use ranks_per_host=1"
                ) from error
            for rank in self._others:
                self.links.send_json(path, rank, _PHASE)
                self.links.recv_json(rank, _PHASE)
        return shared


def find_problem(links: LocalLinks, members: Sequence[int]) -> str | None:
    """Why the ranks of a host cannot share memory, the same on all of them; None if they can."""
    leader, *others = members
    path, found = None, None
    if links.comm.rank != leader:
        path = links.recv_json(leader, _PHASE)
        try:
            if path is not None:
                _open(path, mmap.PAGESIZE)
        except (OSError, WireError) as error:
            found = f"rank {links.comm.rank} and rank {leader} have no memory in common: {error}"
        links.send_json(found, leader, _PHASE)
        verdict: str | None = links.recv_json(leader, _PHASE)
        return verdict
    with ExitStack() as stack:
        try:
            path, _ = stack.enter_context(_create(mmap.PAGESIZE))
        except OSError as error:
            found = f"rank {leader} has none: {error}"
        for rank in others:
            links.send_json(path, rank, _PHASE)
        problems = [links.recv_json(rank, _PHASE) for rank in others]
    found = next(filter(None, problems), found)
    for rank in others:
        links.send_json(found, rank, _PHASE)
    return found


@contextmanager
def _create(size: int) -> Iterator[tuple[str, Tensor]]:
    """(path, new memory of so many bytes); within the block others can open it by that path."""
    path = _folder() / f"oktopk-{uuid.uuid4().hex}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # a page that turns out to be missing would end the process
            memory = _map(file, size)
        finally:
            os.close(file)
        yield str(path), memory
    finally:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return _FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())


def _open(path: Any, size: int) -> Tensor:
    """Memory that another process has created as above. No other file is opened, whatever the leader names."""
    name = Path(path).name if isinstance(path, str) else ""
    if not _NAME.fullmatch(name):
        raise WireError(f"host memory: the leader named {path!r}, which is no shared memory of ours")
    file = os.open(_folder() / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
            raise WireError(f"host memory: {path} is no shared memory of {size} bytes of ours")
        return _map(file, size)
    finally:
        os.close(file)


def _map(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
