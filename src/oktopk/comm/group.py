"""Ranks of a torch.distributed process group (gloo, nccl)."""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from ..errors import Aborted, CommError, CommTimeout, OkTopkError
from ..traffic import Operation
from .base import DEFAULT_TIMEOUT, Communicator, trim

_log = logging.getLogger(__name__)

_PATIENCE = timedelta(seconds=2)
"""How long to wait for the store, whose own host may be the one that died."""

_made: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made, by their ranks. torch would use the name of a destroyed group again, and
its ranks then meet the addresses that the old ones left in the store."""


class _Work:
    """A torch Work with its buffer kept alive, and errors that say who and where."""

    def __init__(
        self,
        comm: GroupCommunicator,
        work: Any,
        peer: int,
        operation: Operation,
        finish: Callable[[], Tensor],
    ) -> None:
        self.comm, self.work, self.peer, self.operation, self.finish = comm, work, peer, operation, finish
        comm.under_way.add(self)

    def wait(self, deadline: float) -> Tensor:
        if self.work is None:
            raise CommError(f"{self.operation}: the communicator has been closed")
        try:
            self.work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise self.comm.explain(error, self.operation, f"rank {self.peer}", deadline) from error
        return self.finish()


class _Notices:
    """A place in the job's store where a rank that gives up leaves its reason."""

    def __init__(self, name: str) -> None:
        # A clone has a connection of its own: its timeout is not that of everybody, and no lock is shared.
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        self._store.set_timeout(_PATIENCE)
        self._key = f"oktopk/{name}/failed"

    def post(self, reason: str) -> None:
        try:
            self._store.compare_set(self._key, "", reason)  # the first reason is the one that counts
        except RuntimeError as error:  # gone with its host: then the others only see a lost connection
            _log.debug("could not leave a notice of the failure: %s", error)

    def read(self) -> str | None:
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        except RuntimeError as error:
            _log.debug("could not look for a notice of a failure: %s", error)
            return None


class GroupCommunicator(Communicator):
    """A process group. Take exclusive() if another thread communicates too.

    Messages are in host memory and travel by gloo, which lets a receive be larger than the message. A group
    without gloo (nccl alone) gets a companion for them, made by all its ranks together; its own backend does
    the dense sums of what is on its devices.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        companion: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise CommError("torch.distributed is not initialised: call init_process_group first")
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        own: Any = dist.group.WORLD if group is None else group
        self._devices = self._messages = own
        ranks = tuple(dist.get_process_group_ranks(own))
        name = str(own.group_name)
        if "cpu:gloo" not in dist.get_backend_config(group) if companion is None else companion:
            _made[ranks] += 1
            life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job may meet its old store
            name = f"{life}/{'-'.join(map(str, ranks))}/{_made[ranks]}"
            store = PrefixStore(f"oktopk/{name}", dist.distributed_c10d._get_default_store())
            self._messages = dist.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=timeout))
        self._notices = _Notices(name)
        self.under_way: weakref.WeakSet[_Work] = weakref.WeakSet()

    @classmethod
    def exclusive(
        cls, group: dist.ProcessGroup | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> GroupCommunicator:
        """The same ranks over connections that nobody else uses, made by all of them together."""
        if not dist.is_initialized():
            raise CommError("torch.distributed is not initialised: call init_process_group first")
        own = group
        if dist.get_backend(group) != "gloo":
            ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            own = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
        return cls(own, timeout, companion=True)

    def fail(self, error: BaseException) -> None:
        """Leave the reason where the others will look, and hang up, so that they look."""
        clear = isinstance(error, (OkTopkError, OSError))  # others need to see where they come from
        said = str(error) if clear else "".join(traceback.format_exception(error)).strip()
        self._notices.post(f"rank {self.rank} failed: {said}")
        self.close()

    def close(self) -> None:
        """Hang up: connections end with the last reference to the group and to what is under way on it."""
        self._messages = self._devices = None
        for pending in list(self.under_way):
            pending.work = None

    def explain(self, error: Exception, operation: Operation, who: str, deadline: float) -> CommError:
        """Why an operation failed: another rank's own word for it, if there is one."""
        late = time.monotonic() >= deadline - 0.002
        if reason := self._notices.read():
            return Aborted(f"{operation}: {reason}")
        if late:
            return CommTimeout(f"{operation}: no answer from {who} within {self.timeout:g} s")
        return CommError(f"{operation}: the connection to {who} failed: {error}")

    def _open(self, operation: Operation) -> Any:
        if self._messages is None:
            raise CommError(f"{operation}: the communicator has been closed")
        return self._messages

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Work:
        group = self._open(operation)
        try:
            work = group.send([message], peer, 0)
        except ValueError as error:
            raise CommError(f"{operation}: cannot send to rank {peer}: {error}") from error
        except RuntimeError as error:  # it has hung up already
            raise self.explain(error, operation, f"rank {peer}", math.inf) from error
        return _Work(self, work, peer, operation, lambda: message)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Work:
        buffer = torch.empty(capacity, dtype=torch.uint8)
        group = self._open(operation)
        try:
            work = group.recv([buffer], peer, 0)
        except ValueError as error:
            raise CommError(f"{operation}: cannot receive from rank {peer}: {error}") from error
        except RuntimeError as error:  # it has hung up already
            raise self.explain(error, operation, f"rank {peer}", math.inf) from error
        return _Work(self, work, peer, operation, lambda: trim(buffer, peer, operation))

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        deadline = self._deadline()
        summed = x.contiguous()
        # The options bound gloo's own thread too; without them it waits on, and the process cannot end.
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self.timeout)
        group = self._open(operation) if x.is_cpu else self._devices
        try:
            group.allreduce([summed], options).wait(options.timeout)
        except RuntimeError as error:
            raise self.explain(error, operation, "the other ranks", deadline) from error
        if summed is not x:
            x.copy_(summed)
