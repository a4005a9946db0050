"""Dense sums over all ranks, by the all-reduce of torch's process groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.timeouts import TIMEOUTS
from ..messages import Closed
from .gloo_abort import abort_connections


class Sum:
    """One sum under way in a group."""

    def __init__(self, group: Any, x: Tensor, options: Any) -> None:
        self._x, self._summed = x, x.contiguous()
        self._work = group.allreduce([self._summed], options)

    def wait(self, timeout: float, check: Callable[[], None]) -> None:
        """Block until the sum is in x; a failure raises a RuntimeError.

        Args:
            timeout: In seconds from now; sums that were begun earlier come first.
            check: Called once per poll interval on CPUs; raises if there is nothing to wait for any more.
        """
        if self._x.is_cpu:
            self._poll(timeout, check)
        else:  # the current stream waits, not the host; the watchdog of nccl ends a sum that takes too long
            self._work.wait()
        if self._summed is not self._x:
            self._x.copy_(self._summed)

    def _poll(self, timeout: float, check: Callable[[], None]) -> None:
        interval, end = timedelta(seconds=min(timeout, TIMEOUTS.poll)), time.monotonic() + timeout
        while True:
            try:
                self._work.wait(interval)
                return
            except RuntimeError:
                if self._work.is_completed() or time.monotonic() >= end:
                    break
            try:
                check()
            except RuntimeError:  # a rank is gone; it may have been the first to complete this sum
                if not self._completes(TIMEOUTS.last_look):
                    raise
                break
        self._work.wait(timedelta(seconds=TIMEOUTS.immediate))  # raises the error, unless it was only an interval

    def _completes(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._work.is_completed() and time.monotonic() < end:
            time.sleep(TIMEOUTS.pause)
        return bool(self._work.is_completed())


class GroupSums:
    """Sums in the process groups of one rank.

    Args:
        given: The group of the user; sums tensors on its devices.
        cpu: A gloo group of our own, for tensors in host memory; or `given` once more.
        rank: This rank in both.
        world: How many ranks there are.
    """

    def __init__(self, given: Any, cpu: Any, rank: int, world: int) -> None:
        self._given, self._cpu, self._rank, self._world = given, cpu, rank, world
        self._options = dist.AllreduceOptions()
        self._process = os.getpid()

    def group_of(self, x: Tensor) -> Any:
        """The group that sums a tensor."""
        group = self._cpu if x.is_cpu else self._given
        if group is None:
            raise Closed
        return group

    def begin(self, x: Tensor, timeout: float) -> Sum:
        """Begin to sum x in place. All ranks begin their sums in the same order."""
        self._options.timeout = timedelta(seconds=timeout)  # or gloo's thread keeps the process alive
        return Sum(self.group_of(x), x, self._options)

    def close(self) -> None:
        """Drop the groups. Connections of our own are closed first: with a sum under way the group would wait."""
        if self._cpu is not self._given:
            self.abort()
        self._cpu = self._given = None

    def abort_device(self) -> None:
        """Abort the communicator of the given group's GPUs, if it has one: a sum under way would never end.

        The other ranks learn of the failure by their messages, and do the same.
        """
        types = getattr(self._given, "_device_types", ())
        if self._given is None or os.getpid() != self._process or torch.device("cuda") not in types:
            return
        backend = self._given._get_backend(torch.device("cuda"))
        if hasattr(backend, "abort"):
            backend.abort()

    def abort(self) -> None:
        """Close the connections for CPU tensors, which wakes every wait. A forked process leaves them alone."""
        if self._cpu is not None and os.getpid() == self._process:
            abort_connections(self._cpu, self._rank, self._world)
