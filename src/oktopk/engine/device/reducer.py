"""Sparse buckets without the host: `oktopk-static` by the collectives of the device that holds the gradients.

    reduce(group) …    acc = residual + gradient; the step in static shapes; nothing is written yet
    finish()           all groups of the step: new residuals and means, or the old residuals and zeros, chosen on
                       the device by one flag; a few numbers start their way to the host
    read()             those numbers: of this step on a CPU, of the step before on a GPU, which has them ready

So on a GPU the host learns one step later that a step was skipped. The gradients of that step are zeros, or NaNs
with a GradScaler, which then skips the step itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...algorithms.oktopk_static import OkTopkStatic, StaticPlan, StaticResult, static_step
from ...algorithms.selection import target_count
from ...comm import Metered
from ...comm.fixed import FixedCollectives
from ...errors import WireError
from ...feedback.accumulator import narrow
from ...feedback.buckets import Bucket
from ...feedback.residuals import ResidualStore
from ...kernels.values import ValueCode
from ...metrics.events import SPARSE, ReductionEvent, Volume
from ...metrics.traffic import Operation
from ...utils.streams import Mark, streams_of
from ...wire.codecs import find_values
from ..bucket_state import BucketGroup, BucketResult, Handed
from ..recorder import ReductionRecorder
from ..settings import Settings


class Figures(NamedTuple):
    """What the host is told about a step."""

    step: int
    nonfinite: bool
    differs: bool
    local_count: int
    result_count: int
    residual_norm: float


@dataclass(eq=False)
class _Pending:
    """A group whose result is not committed yet."""

    handed: Sequence[Handed]
    residuals: Sequence[Tensor]
    acc: Tensor
    held_back: Tensor | None
    """Residuals of parameters that got no gradient here."""
    dense_mean: Tensor | None
    """The mean of the entries that are always dense."""
    always_dense: Tensor
    result: StaticResult

    @property
    def nonfinite(self) -> Tensor:
        if self.dense_mean is None:
            return self.result.nonfinite
        return self.result.nonfinite | ~self.dense_mean.isfinite().all()

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """The parts of each bucket."""
        return torch.split(whole, [residual.numel() for residual in self.residuals])

    def unsent(self) -> Tensor:
        """The residual if nothing is sent. Each rank takes its share of dense sums, so that no mass is lost."""
        unsent = self.acc if self.held_back is None else self.acc + self.held_back
        if self.dense_mean is None:
            return unsent
        return unsent.index_copy(0, self.always_dense, self.dense_mean)


class DeviceReducer:
    """Reduces groups of buckets on their device.

    Args:
        settings: how to reduce; the algorithm is OkTopkStatic.
        meter: where traffic is counted.
        residuals: those of all buckets.
        unused_stay: whether residuals of parameters without a gradient are kept back.
    """

    def __init__(self, settings: Settings, meter: Metered, residuals: ResidualStore, unused_stay: bool) -> None:
        self._settings, self._meter, self._residuals = settings, meter, residuals
        self._unused_stay = unused_stay
        code = find_values(settings.values)
        assert isinstance(code, ValueCode)
        self._code = code
        self._groups: list[_Pending] = []
        self._told: tuple[int, Tensor, Mark] | None = None
        """The step, its numbers in host memory, and when they are there."""
        self.last: Figures | None = None
        self._sizes: dict[tuple[Bucket, torch.device], Tensor] = {}
        """Of the parameters of each bucket."""

    @staticmethod
    def suits(settings: Settings) -> bool:
        """Whether groups can be reduced without the host, if their device has collectives."""
        algorithm = settings.algorithm
        possible = isinstance(algorithm, OkTopkStatic) and algorithm.resident is not False
        return possible and not settings.momentum and settings.ranks_per_host == 1

    def collectives(self, device: torch.device) -> FixedCollectives | None:
        """Those by which a group on this device is reduced without the host; None if it is not."""
        algorithm = self._settings.algorithm
        assert isinstance(algorithm, OkTopkStatic)
        wanted = device.type != "cpu" or algorithm.resident
        return self._meter.device_collectives(device) if wanted else None

    def reduce(
        self, comm: FixedCollectives, group: BucketGroup, handed: Sequence[Handed], density: float, step: int
    ) -> tuple[list[BucketResult], ReductionEvent]:
        """Begin a group; the results are in the gradients' memory after finish()."""
        recorder = ReductionRecorder(self._meter, step, group.index, group.size)
        k = target_count(group.compressible, density)
        with recorder.watch.stage("select"):
            pending = self._accumulate(comm, handed)
            plan = StaticPlan(group.size, k, comm.rank, comm.world, self._code)
            checksum = _as_checksum(group.tracking, pending.acc.device)
            stamp = (step * 8191 + group.index) % 2**31
            pending.result = static_step(plan, comm, pending.acc, checksum, stamp)
        group.tracking = pending.result.checksum
        self._groups.append(pending)
        self._count_traffic(plan)
        always_dense = group.size - group.compressible
        known = self.last or Figures(step, False, False, k, k, 0.0)
        event = recorder.close(
            SPARSE, self._settings.algorithm.name,
            Volume.of(group.compressible, known.result_count) + Volume.of(always_dense, None),
            target_count=k + always_dense, local_count=known.local_count + always_dense,
            residual_norm=known.residual_norm, exact=True,
        )  # fmt: skip
        return [BucketResult(one, one.grad) for one in handed], event

    def _accumulate(self, comm: FixedCollectives, handed: Sequence[Handed]) -> _Pending:
        """residual + gradient of all buckets, without the entries that are averaged densely."""
        works = [one.unscaled() for one in handed]
        residuals = [self._residuals.flat(one.state.bucket, one.grad.device) for one in handed]
        work, residual, held_back = torch.cat(works), torch.cat(residuals), None
        if self._unused_stay:
            used = torch.cat([self._used(one, work) for one, work in zip(handed, works, strict=True)])
            held_back = torch.where(used, 0.0, residual)
            residual = torch.where(used, residual, 0.0)
        acc, starts = work.add_(residual), 0
        places = []
        for one in handed:
            places.append(one.state.always_dense + starts)
            starts += one.grad.numel()
        always_dense, mean = torch.cat(places), None
        if always_dense.numel():
            mean = acc.index_select(0, always_dense).mul_(1.0 / comm.world)
            comm.all_reduce_(mean, "always dense")
            acc.index_fill_(0, always_dense, 0.0)
        return _Pending(handed, residuals, acc, held_back, mean, always_dense, None)  # type: ignore[arg-type]

    def _used(self, one: Handed, work: Tensor) -> Tensor:
        """Where parameters lie that got a gradient, [n]."""
        filled = one.state.bucket.filled
        key = one.state.bucket, work.device
        if key not in self._sizes:
            self._sizes[key] = torch.tensor([place.stop - place.start for place in filled], device=work.device)
        used = torch.stack(list(torch._foreach_norm([work[place] for place in filled], math.inf))) != 0
        return used.repeat_interleave(self._sizes[key], output_size=work.numel())

    def drop(self, keep: bool) -> None:
        """Give up the groups of a step; their gradients stay in the residuals if those are to `keep` them."""
        groups, self._groups = self._groups, []
        for group in groups if keep else ():
            kept = group.unsent()
            for residual, part in zip(group.residuals, group.split(kept), strict=True):
                residual.copy_(torch.where(kept.isfinite().all(), part, residual))

    def finish(self, step: int) -> None:
        """Commit all groups of the step on the device, unless one of them is not finite there."""
        groups, self._groups = self._groups, []
        if not groups:
            return
        flags = torch.stack([group.nonfinite for group in groups])
        bad, lost = flags.any(), flags.cumsum(0) > 0
        for place, group in enumerate(groups):
            self._commit(group, bad, lost[place])
        results = [group.result for group in groups]
        norms = torch.stack([torch.linalg.vector_norm(r) for group in groups for r in group.residuals])
        told = [
            bad,
            torch.stack([result.differs for result in results]).any(),
            torch.stack([result.local_count for result in results]).sum(),
            torch.stack([result.won.sum() for result in results]).sum(),
            torch.linalg.vector_norm(norms),
        ]
        self._tell(step, torch.stack([number.double() for number in told]))

    def _commit(self, group: _Pending, bad: Tensor, lost: Tensor) -> None:
        """Commit a group, unless the step is `bad`: then its gradient stays in the residual, or is `lost`.

        Groups from the one that is not finite on are lost, as they are where the host decides.
        """
        result = group.result
        kept = group.acc - result.leaving
        mean = result.sums / self._meter.world
        if group.dense_mean is not None:
            mean.index_copy_(0, group.always_dense, group.dense_mean)
        if group.held_back is not None:
            kept = kept + group.held_back
        parts = zip(*(group.split(whole) for whole in (mean, kept, group.unsent())), strict=True)
        for one, residual, (share, new, unsent) in zip(group.handed, group.residuals, parts, strict=True):
            rounding = self._write(one, share, bad)
            if rounding is not None:
                new = new + rounding
            residual.copy_(torch.where(bad, torch.where(lost, residual, unsent), new))

    def _write(self, one: Handed, mean: Tensor, bad: Tensor) -> Tensor | None:
        """Write the mean to the gradient's memory. Returns what its type cannot hold, which stays with rank 0."""
        scaled = mean if one.scale is None else mean * one.scale
        nothing = 0.0 if one.scale is None else math.nan
        narrower = one.grad.dtype.itemsize < 4
        written = narrow(scaled, one.grad.dtype) if narrower else scaled
        one.grad.copy_(torch.where(bad, nothing, written))
        if not narrower or self._meter.rank != 0:
            return None
        return (scaled - written.float()).div_(one.scale or 1.0).mul_(self._meter.world)

    # What the host is told.

    def _tell(self, step: int, told: Tensor) -> None:
        """Start to copy the numbers of a step to the host, which is not waited for."""
        if told.is_cuda:
            room = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            room.copy_(told, non_blocking=True)
            self._told = step, room, streams_of(told).record()
        else:
            self._told = step, told, None

    def nonfinite_here(self) -> bool:
        """Whether a group of this step is not finite, where the host can read that at no cost: on a CPU."""
        return any(bool(group.nonfinite) for group in self._groups if group.acc.is_cpu)

    def names(self) -> list[str]:
        """The parameters of this step that are not finite here."""
        found = []
        for group in self._groups:
            for one, piece in zip(group.handed, group.split(group.acc), strict=True):
                found += one.state.nonfinite(piece)
        return found

    def read(self) -> Figures | None:
        """The figures of the last step that has told them, if any. Raises what they say is wrong."""
        if self._told is None:
            return None
        (step, told, event), self._told = self._told, None
        if event is not None:
            event.synchronize()  # a step has passed: it is over
        bad, differs, local, found, norm = told.tolist()
        self.last = Figures(step, bool(bad), bool(differs), int(local), int(found), norm)
        if self.last.differs:
            raise WireError(
                f"oktopk-static, by step {step}: ranks differ in the result of a step, or got a message of "
                "another one. Restart from the last checkpoint"
            )
        return self.last

    def _count_traffic(self, plan: StaticPlan) -> None:
        others, size = plan.world - 1, plan.format.message_bytes
        for operation in (Operation("all_to_all", "split"), Operation("all_gather", "gather")):
            tally = self._meter.tally(operation)
            for _ in range(others):
                tally.sent(size)
                tally.received(size)


def _as_checksum(tracking: Tensor | int | None, device: torch.device) -> Tensor:
    if isinstance(tracking, Tensor):
        return tracking
    return torch.full((), tracking or 0, dtype=torch.int64, device=device)
