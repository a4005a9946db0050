"""Ranks of a torch.distributed process group (gloo, nccl)."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
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
from ..metrics.traffic import Operation
from .base import DEFAULT_TIMEOUT, ROOM, Communicator, interrupted, listed, seconds_until, trim
from .failure_board import FailureBoard
from .gloo_abort import AT_ONCE, cut
from .tcp.mesh import Closed, Mesh
from .tcp.rendezvous import MEETING, connect_all, tcp_allowed
from .unhurried import unhurried

_log = logging.getLogger(__name__)

_LOOK = timedelta(seconds=1)
"""How often somebody who waits looks for notes of others."""

_DATA = 0
"""The tag of messages."""

_LOOP = "gloo_tcp_loop"
"""The thread of a gloo group that serves its connections."""

_LARGE = 1 << 20
"""Bytes from which on a posted sum goes in connections of our own, whose thread pushes nobody off. For smaller
ones it counts more that those of the group that was given are awake."""

_made: Counter[tuple[int, ...]] = Counter()
"""How many groups this process has made, by their ranks. torch would use the name of a destroyed group again, and
its ranks then meet the addresses that the old ones left in the store."""


def _life() -> str:
    """Which start of the job this is, where torchrun keeps one store for all of them. Otherwise every start has a
    new store, and it may not be asked: an agent that came later counts fewer restarts than the others."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"


class _Work:
    """A torch Work, or a message of ours, with its buffer kept alive, and errors that say who and where."""

    def __init__(
        self,
        comm: GroupCommunicator,
        work: Any,
        peer: int,
        operation: Operation,
        finish: Callable[[], Tensor],
    ) -> None:
        self.comm, self.work, self.peer, self.operation, self.finish = comm, work, peer, operation, finish
        comm.note(self)

    def wait(self, deadline: float) -> Tensor:
        work = self.work  # which another thread may take away
        if work is None:
            raise CommError(f"{self.operation}: the communicator has been closed")
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise self.comm.explain(error, self.operation, self.peer, deadline) from error
        return self.finish()


class GroupCommunicator(Communicator):
    """A process group. Take exclusive() if another thread communicates too.

    Messages are in host memory. In a group that others have made they travel by gloo, which lets a receive be
    larger than the message. A group without gloo (nccl alone), or one that is to be exclusive, gets a companion,
    made by all its ranks together: then messages have TCP connections of their own, if all ranks can make them.
    The group's own backend does the dense sums of what is on its devices.
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
        self._mesh: Mesh | None = None
        """Connections for messages, if they do not go through gloo."""
        self._sum_options, self._swap_options = dist.AllreduceOptions(), dist.AllToAllOptions()
        self._under_way: weakref.WeakSet[_Work] = weakref.WeakSet()
        self._sums: set[Any] = set()
        """Those under way in connections of our own. While there is one, the group cannot end."""
        self._noting = threading.Lock()
        self._interrupted = False
        ranks = tuple(dist.get_process_group_ranks(own))
        name = str(own.group_name)
        tcp = tcp_allowed()
        apart = "cpu:gloo" not in dist.get_backend_config(group) if companion is None else companion
        if apart:
            _made[ranks] += 1
            name = f"{_life()}/{'-'.join(map(str, ranks))}/{_made[ranks]}"
        self._notices = FailureBoard(name, self.rank, self.world)
        if apart:
            self._messages = self._connect(name, tcp)

    def _connect(self, name: str, tcp: bool) -> Any:
        """A group of our own, made by all ranks together, and perhaps connections for messages."""
        deadline = self._deadline()
        store = PrefixStore(f"oktopk/{name}", dist.distributed_c10d._get_default_store())
        try:
            with unhurried(_LOOP):
                group: Any = dist.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=self.timeout))
            self._meet(group, store, tcp)
            group.barrier().wait()  # who hung up now would break the connecting of others
        except RuntimeError as error:
            group = None  # so that the others notice
            operation = Operation("barrier", "connecting", control=True)
            raise self.explain(error, operation, None, deadline) from error
        return group

    def _meet(self, group: Any, store: Any, tcp: bool) -> None:
        """Connections of our own for messages, if all ranks can make them: they cost less than those of gloo."""
        problem = None
        try:
            if tcp and self.world > 1:
                patience = min(self.timeout / 3, MEETING)  # who does not have to wait is already at the vote
                self._mesh = Mesh(connect_all(store, self.rank, self.world, time.monotonic() + patience))
        except Exception as error:  # whatever it is, the others wait for this rank's vote
            problem = error
        votes = torch.tensor([0 if self._mesh is None else 1])
        group.allreduce([votes], self._bounded(self._sum_options)).wait()
        if int(votes) == self.world:
            return
        if problem is not None:
            _log.warning("rank %d: messages go through gloo, which is slower: %s", self.rank, problem)
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

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

    def note(self, work: _Work) -> None:
        with self._noting:
            self._under_way.add(work)

    def close(self) -> None:
        """Hang up: those of gloo end with the last reference to the group and to what is under way on it.

        With a sum of our own under way the group would wait for it, and for all ranks: it is cut first.
        """
        with self._noting:
            group, self._messages, self._devices = self._messages, None, None
            mesh, self._mesh = self._mesh, None
            summing = bool(self._sums)
            self._sums.clear()
            for pending in self._under_way:
                pending.work = None
        if mesh is not None:
            mesh.close()
        if summing:
            cut(group, self.rank, self.world)

    def interrupt(self) -> None:
        """Wake whoever waits."""
        group, self._interrupted = self._messages, True
        self._notices.silence()
        self.close()
        cut(group, self.rank, self.world)

    def explain(self, error: Exception, operation: Operation, peer: int | None, deadline: float) -> CommError:
        """Why an operation with a peer, or with all, failed: another rank's own word for it, if there is one.

        The caller has let go of the group if all ranks take part: they shall notice, and say that they are there.
        """
        if self._interrupted:
            return CommError(interrupted(operation))
        if isinstance(error, Closed):
            return CommError(f"{operation}: the communicator has been closed")
        late = time.monotonic() >= deadline - 0.002
        if peer is None:
            self.close()
        reason, lost = self._notices.lose(peer)
        if late:  # what was posted would take what comes next, and whoever waits for this rank shall notice
            self.close()
        who = listed(lost) or "the other ranks"
        what = f"the connection to {who} failed: {error}"
        if late:
            what = f"no answer from {who} within {seconds_until(deadline, self.timeout):g} s"
        if reason is None:
            return (CommTimeout if late else CommError)(f"{operation}: {what}")
        if late and not any(re.search(rf"rank {rank}\b", reason) for rank in lost):  # who told did not know that
            reason = f"{reason}; {what}"
        return Aborted(f"{operation}: {reason}")

    def _open(self, operation: Operation, devices: bool = False) -> Any:
        group = self._devices if devices else self._messages
        if group is None:
            raise CommError(f"{operation}: the communicator has been closed")
        return group

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Work:
        mesh, group = self._mesh, self._open(operation)
        try:
            work = group.send([message], peer, _DATA) if mesh is None else mesh.send(message, peer)
        except ValueError as error:
            raise CommError(f"{operation}: cannot send to rank {peer}: {error}") from error
        except RuntimeError as error:  # it has hung up already
            raise self.explain(error, operation, peer, math.inf) from error
        return _Work(self, work, peer, operation, lambda: message)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Work:
        mesh, group = self._mesh, self._open(operation)
        if mesh is not None:
            return self._receive(mesh, capacity, peer, operation)
        buffer = torch.empty(max(capacity, ROOM), dtype=torch.uint8)
        try:
            work = group.recv([buffer], peer, _DATA)
        except ValueError as error:
            raise CommError(f"{operation}: cannot receive from rank {peer}: {error}") from error
        except RuntimeError as error:  # it has hung up already
            raise self.explain(error, operation, peer, math.inf) from error
        return _Work(self, work, peer, operation, lambda: trim(buffer[:capacity], peer, operation))

    def _receive(self, mesh: Mesh, capacity: int, peer: int, operation: Operation) -> _Work:
        try:
            receiving = mesh.receive(capacity, peer)
        except ValueError as error:
            raise CommError(f"{operation}: cannot receive from rank {peer}: {error}") from error
        except Closed as error:
            raise self.explain(error, operation, peer, math.inf) from error
        whose = f"{operation}: the message from rank {peer}"
        return _Work(self, receiving, peer, operation, lambda: receiving.message(whose))

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation, deadline = Operation("all_reduce", phase, control), self._deadline()
        summed = x.contiguous()
        group = self._open(operation, devices=not x.is_cpu)
        try:
            group.allreduce([summed], self._bounded(self._sum_options)).wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            del group
            raise self.explain(error, operation, None, deadline) from error
        if summed is not x:
            x.copy_(summed)

    def post_sum(self, x: Tensor, operation: Operation) -> Callable[[], None]:
        """Begin to sum x, contiguous and in host memory; call the result to wait.

        A small one goes in the group that was given: all ranks must begin it at the same place among whatever else
        they do there, as DDP does.
        """
        own = x.nbytes >= _LARGE and self._messages is not self._devices
        return self._post(lambda group: group.allreduce([x], self._bounded(self._sum_options)), operation, own)

    def post_swap(self, received: Tensor, sent: Tensor, operation: Operation) -> Callable[[], None]:
        """Begin to send part r to rank r and to receive one from each, all of one size: as small sums go."""
        options = self._bounded(self._swap_options)
        return self._post(lambda group: group.alltoall_base(received, sent, [], [], options), operation, False)

    def _post(self, begin: Callable[[Any], Any], operation: Operation, own: bool) -> Callable[[], None]:
        """Begin a collective in our `own` connections, or in the group that was given."""
        group, deadline = self._open(operation, devices=not own), self._deadline()
        try:
            work = begin(group)
        except RuntimeError as error:
            del group
            raise self.explain(error, operation, None, deadline) from error
        if own:
            self._keep(work, group, operation)

        def wait() -> None:
            try:
                self._wait_or_hear(work)
            except RuntimeError as error:
                raise self.explain(error, operation, None, deadline) from error
            self._sums.discard(work)

        return wait

    def _keep(self, sum_: Any, group: Any, operation: Operation) -> None:
        """Remember a sum that is under way, unless another thread has closed the communicator meanwhile."""
        with self._noting:
            closed = self._messages is not group
            if not closed:
                self._sums.add(sum_)
        if closed:
            cut(group, self.rank, self.world)
            raise CommError(f"{operation}: the communicator has been closed")

    def _wait_or_hear(self, work: Any) -> None:
        """Wait for a sum, and look now and then what others have to say: who fails cannot cut a group of DDP's."""
        end = self._deadline()  # counts from now on: sums that were begun earlier come first
        while True:
            try:
                work.wait(min(timedelta(seconds=self.timeout), _LOOK))
                return
            except RuntimeError as error:
                if work.is_completed() or time.monotonic() >= end:
                    break
                if self._interrupted:
                    raise
                if self._notices.trouble():
                    raise RuntimeError("another rank has given up") from error
        work.wait(AT_ONCE)  # raises what it was, unless it was just a look at the clock

    def _bounded(self, options: Any) -> Any:
        """Options that bound gloo's own thread too; without them it waits on, and the process cannot end."""
        options.timeout = timedelta(seconds=self.timeout)
        return options
