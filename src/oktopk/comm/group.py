"""Ranks of a torch.distributed process group (gloo, nccl)."""

from __future__ import annotations

import logging
import math
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from ..errors import Aborted, CommError, CommTimeout, OkTopkError
from ..metrics.traffic import Operation
from ..utils.timeouts import TIMEOUTS, seconds_until
from .base import Communicator
from .failure_board import FailureBoard
from .fixed import OverGroup
from .messages import Closed, LostRank, Messages, Transfer
from .process_group.gloo_forks import leave_gloo_to_parent
from .process_group.gloo_messages import GlooMessages
from .process_group.limits import group_timeout, raise_file_limit, timeout_problem
from .process_group.scheduling import batch_scheduled
from .process_group.sums import GroupSums
from .tcp.handshake import MOST_UNIDENTIFIED
from .tcp.meeting import Meeting, key_before_session, key_without_session
from .transport import CLOSED, INTERRUPTED, PendingSum, format_ranks

_log = logging.getLogger(__name__)

_TOLERANCE = 0.002
"""Seconds: torch counts its timeouts in whole milliseconds."""

_made: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made, by their ranks. torch would use the name of a destroyed group again, and
its ranks would find the addresses that the old ones left in the store."""


def _restart_count() -> str:
    """Which start of the job this is, where torchrun keeps one store for all of them. Otherwise every start has a
    new store, and the count may differ: an agent that came later counts fewer restarts than the others."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"


def _require_torch_distributed() -> None:
    if not dist.is_initialized():
        raise CommError("torch.distributed is not initialised: call init_process_group first")


class _PendingMessage:
    """A message under way, whose errors say who and where."""

    def __init__(self, comm: GroupCommunicator, transfer: Transfer, peer: int, operation: Operation) -> None:
        self.comm, self.transfer, self.peer, self.operation = comm, transfer, peer, operation

    def wait(self, deadline: float) -> Tensor:
        left = max(deadline - time.monotonic(), TIMEOUTS.immediate)
        with self.comm.explaining(self.operation, self.peer, deadline):
            self.transfer.wait(timedelta(seconds=left))
        return self.transfer.message(self.peer, self.operation)


class _PendingSum:
    """A sum under way, whose errors say who and where."""

    def __init__(
        self, comm: GroupCommunicator, finish: Callable[[], None], operation: Operation, deadline: float
    ) -> None:
        self.comm, self.finish, self.operation, self.deadline = comm, finish, operation, deadline

    def wait(self) -> None:
        with self.comm.explaining(self.operation, None, self.deadline):
            self.finish()


class GroupCommunicator(Communicator):
    """The ranks of a process group.

    Messages are in host memory. In a group that others have made they go through gloo. With a companion, a gloo
    group of our own that all ranks set up together, messages have dedicated TCP connections; they fall back to
    gloo if any rank cannot connect. Dense sums of CPU tensors go through the companion, or through the given group
    if there is none; those of device tensors always go through the given group, whose backend sums them.

    Use `exclusive()` if another thread communicates in the same group.

    Args:
        group: The process group; by default the one of all ranks.
        timeout: Seconds that a rank that is alive may keep this one waiting, and that the set-up may take; by
            default the timeout of the process group. Ranks whose process has ended, or whose host has been silent
            for 30 s, are not waited for.
        companion: Whether to set up a companion. By default only for a group without gloo (nccl alone).

    Raises:
        CommError: torch.distributed is not initialised, the ranks could not connect, or their secrets
            (OKTOPK_SECRET, docs/security.md) differ.
        ValueError: The timeout is not a number of seconds; with a companion on every rank, though one was wrong.

    Example, in every process of `torchrun --nproc-per-node=2`::

        dist.init_process_group("gloo")
        comm = oktopk.GroupCommunicator.exclusive(timeout=60)
        x = torch.ones(3)
        comm.all_reduce_(x, "example")  # tensor([2., 2., 2.])
        comm.close()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        companion: bool | None = None,
    ) -> None:
        _require_torch_distributed()
        leave_gloo_to_parent()
        given: Any = dist.group.WORLD if group is None else group
        mistake = timeout_problem(timeout)
        seconds = group_timeout(given) if timeout is None or mistake else timeout
        super().__init__(dist.get_rank(group), dist.get_world_size(group), seconds)
        self._sums = GroupSums(given, given, self.rank, self.world)
        self._messages: Messages = GlooMessages(given)
        self._interrupted = False
        self._collectives: dict[str, OverGroup] = {}
        name, ranks = str(given.group_name), tuple(dist.get_process_group_ranks(given))
        self._global_ranks = ranks
        if companion is None:
            companion = "cpu:gloo" not in dist.get_backend_config(group)
        if companion:
            _made[ranks] += 1
            name = f"{_restart_count()}/{'-'.join(map(str, ranks))}/{_made[ranks]}"
            self._board = FailureBoard(name, self.rank, self.world, key_before_session(name), met=False)
            self._connect(given, name, mistake)
        elif mistake is not None:
            raise ValueError(mistake)
        else:
            self._board = FailureBoard(name, self.rank, self.world, key_without_session(name))

    @classmethod
    def exclusive(cls, group: dist.ProcessGroup | None = None, timeout: float | None = None) -> GroupCommunicator:
        """The same ranks over separate connections; all ranks call it together.

        Sums of device tensors go through the given group, from the thread and in the order in which they are
        begun: a second communicator of nccl beside it could deadlock.

        Args:
            group: The process group; by default the one of all ranks.
            timeout: As above.
        """
        _require_torch_distributed()
        given: Any = dist.group.WORLD if group is None else group
        return cls(group, group_timeout(given) if timeout is None else timeout, companion=True)

    def _connect(self, given: Any, name: str, mistake: str | None) -> None:
        """Set up the companion, together with all other ranks; they are told if an argument is wrong here."""
        limit = None
        try:
            raise_file_limit(3 * self.world + MOST_UNIDENTIFIED)  # gloo's, ours, and those that are not identified
        except CommError as error:
            limit = str(error)
        store = PrefixStore(f"oktopk/{name}", dist.distributed_c10d._get_default_store())
        with self.explaining(Operation("barrier", "connecting", control=True), None, self._deadline()):
            with batch_scheduled():
                own: Any = dist.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=self.timeout))
            self._sums = GroupSums(given, own, self.rank, self.world)
            self._messages = GlooMessages(own)
            meeting = Meeting(self.rank, self.world, self.timeout, self._sum_now)
            mesh, refusal = meeting.meet(store, name, self._board, mistake, limit)
            self._messages = mesh or self._messages
            own.barrier().wait()  # a rank that closed its connections now would break the set-up of others
        if refusal is not None:
            self.close()
            raise refusal

    def global_rank(self, rank: int) -> int:
        return self._global_ranks[rank]

    def _sum_now(self, x: Tensor) -> None:
        self._sums.begin(x, self.timeout).wait(self.timeout, self._check_ranks)

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _PendingMessage:
        return self._post(lambda: self._messages.send(message, peer), peer, operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _PendingMessage:
        return self._post(lambda: self._messages.receive(capacity, peer), peer, operation)

    def _post(self, begin: Callable[[], Transfer], peer: int, operation: Operation) -> _PendingMessage:
        try:
            with self.explaining(operation, peer, math.inf):  # the connection may have failed already
                return _PendingMessage(self, begin(), peer, operation)
        except ValueError as error:
            raise CommError(f"{operation}: invalid peer, rank {peer}: {error}") from error

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        self.begin_all_reduce(x, phase, control=control).wait()

    def begin_all_reduce(self, x: Tensor, phase: str, *, control: bool = False) -> PendingSum:
        operation, deadline = Operation("all_reduce", phase, control), self._deadline()
        with self.explaining(operation, None, deadline):
            begun = self._sums.begin(x, self.timeout)
        return _PendingSum(self, lambda: begun.wait(self.timeout, self._check_ranks), operation, deadline)

    def device_collectives(self, device: torch.device) -> OverGroup:
        """Those of the given group; of the companion for tensors in host memory."""
        if device.type not in self._collectives:
            group = self._sums.group_of(torch.empty(0, device=device))
            self._collectives[device.type] = OverGroup(
                group, lambda operation: self.explaining(operation, None, self._deadline())
            )
        return self._collectives[device.type]

    def _check_ranks(self) -> None:
        """Raise if some rank gave up: a rank that fails cannot close the connections of a group that was given."""
        if self._interrupted:
            raise RuntimeError("interrupted")
        self._messages.check_ranks()
        if self._board.has_failures():
            raise RuntimeError("another rank gave up")

    def fail(self, error: BaseException) -> None:
        """Post the reason on the failure board, and close the connections, so that the other ranks look there."""
        known = isinstance(error, (OkTopkError, OSError))  # of others, ranks need to see where they come from
        text = str(error) if known else "".join(traceback.format_exception(error)).strip()
        self._board.post_failure(f"rank {self.global_rank(self.rank)} failed: {text}")
        self._sums.abort_device()
        self.close()

    def interrupt(self) -> None:
        self._interrupted = True
        self._board.silence()
        self._sums.abort()
        self.close()

    def close(self) -> None:
        self._collectives = {}
        self._messages.close()
        self._sums.close()

    @contextmanager
    def explaining(self, operation: Operation, peer: int | None, deadline: float) -> Iterator[None]:
        """Turn what a message or a sum raises into an error that says who failed, and why.

        Args:
            operation: What it belongs to.
            peer: The other rank; None for a sum over all ranks.
            deadline: The moment of time.monotonic() at which it times out.
        """
        try:
            yield
        except OkTopkError:
            raise
        except RuntimeError as error:
            raise self._explain(error, operation, peer, deadline) from error

    def _explain(self, error: Exception, operation: Operation, peer: int | None, deadline: float) -> CommError:
        """The root cause on another rank, if that rank left a note.

        Unless it is late, the connections are closed at once, so that the other ranks notice and leave their
        notes: those that wait for this rank would otherwise notice one after the other.
        """
        if self._interrupted:
            return CommError(f"{operation}: {INTERRUPTED}")
        if isinstance(error, Closed):
            return CommError(f"{operation}: {CLOSED}")
        late = time.monotonic() >= deadline - _TOLERANCE
        if peer is None or not late:
            self.close()
        reason, missing, isolated = self._board.report_loss(error.peer if isinstance(error, LostRank) else peer)
        lost = [self.global_rank(rank) for rank in missing]
        if late:  # a pending receive would get the next message, and ranks that wait for this one shall notice
            self.close()
        who = format_ranks(lost) or "the other ranks"
        what = f"the connection to {who} failed: {error}"
        if late:
            what = f"no answer from {who} within {seconds_until(deadline, self.timeout):g} s"
        if isolated and not lost:
            me = self.global_rank(self.rank)
            what += f", nor from the job's store: its host is lost, or the link of rank {me} is down"
        if reason is None:
            return (CommTimeout if late else CommError)(f"{operation}: {what}")
        if late and not any(re.search(rf"rank {rank}\b", reason) for rank in lost):  # the reason does not cover it
            reason = f"{reason}; {what}"
        return Aborted(f"{operation}: {reason}")
