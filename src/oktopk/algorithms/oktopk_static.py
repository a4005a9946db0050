"""Ok-Topk in static shapes: a step that never asks the host, for gloo and CPUs as for nccl and GPUs.

    acc   blocks of entries are dealt to P rows in turn, so that every row has its share of every layer
      [ row 0 | row 1 | … ]    two histograms give the cut that takes exactly k; room slots for each row
         |        |            one all-to-all of P messages of fixed size
      sums of this rank's row  one all-reduce of a histogram gives the cut that takes k of all sums
         |                     one all-gather of winners; an entry leaves the residual if it was sent and won

What does not fit into a row's slots, the smallest entries, stays in the residual. All sizes follow from n, k and P
alone. Nothing is remembered from step to step but a checksum of the last result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..comm.fixed import FixedCollectives, OverMessages
from ..feedback.accumulator import Accumulator
from ..kernels import slot_kernels
from ..kernels.histograms import Window, column, last_at_least, share_out, suffix_sums
from ..kernels.slots import COARSE_BITS, FINE, FINE_BITS, INFINITY_BITS, SMALLEST_BITS, Cut, magnitude_bits
from ..kernels.values import ValueCode
from ..wire.slots import RowLayout, SlotFormat, checksum_of
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import SparseVector
from .base import Algorithm, Reduction, foreign_state, skip

ROOM = 1.5
"""A row has slots for ROOM times its share of k, and a few more."""
_MORE = 8
_FIRST_COARSE = SMALLEST_BITS >> COARSE_BITS


class StaticResult(NamedTuple):
    """A step in static shapes: tensors on the device of the gradient."""

    sums: Tensor
    """The sum over ranks, [n]; zero where nothing won. The same on all ranks."""
    won: Tensor
    """Where something won, [n]."""
    leaving: Tensor
    """What leaves this rank's residual, [n]; a negative share of it is a rounding error that stays."""
    left: Tensor
    """Where this rank's own entries left, [n]."""
    nonfinite: Tensor
    """Whether the step must be skipped, 0-d; the same on all ranks."""
    checksum: Tensor
    """Of the messages of the result, 0-d; the same on all ranks, or something is wrong."""
    differs: Tensor
    """Whether some rank had another checksum in the step before, or a message was not meant for this step; 0-d."""
    local_count: Tensor
    low: Tensor
    """The local threshold, as bits, 0-d."""
    global_low: Tensor


@dataclass(frozen=True)
class StaticPlan:
    """Everything about a step that does not depend on data."""

    size: int
    k: int
    rank: int
    world: int
    code: ValueCode = ValueCode.FP32

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.size, self.world)

    @property
    def room(self) -> int:
        """Slots of a row: 1.5 k / P and 8 more, or all of it at density 1."""
        span = self.layout.span
        return span if self.takes_all else min(span, int(ROOM * self.k / self.world) + _MORE)

    @property
    def takes_all(self) -> bool:
        return self.k == self.size

    @property
    def format(self) -> SlotFormat:
        return SlotFormat(self.layout.span, self.room, self.code)


def static_step(
    plan: StaticPlan, comm: FixedCollectives, acc: Tensor, checksum: Tensor, stamp: int = 0,
    check: Callable[[Tensor, str], None] | None = None,
) -> StaticResult:  # fmt: skip
    """One step, from residual + gradient to the sum over ranks.

    Args:
        plan: the sizes.
        comm: the ranks.
        acc: float32 [n].
        checksum: that of the step before, 0-d int64.
        stamp: a number of the step and the bucket, which messages carry.
        check: called with all messages of a phase, where the host can read them at no cost.
    """
    layout, form, room = plan.layout, plan.format, plan.room
    rows = layout.rows(acc)
    kernels = slot_kernels(rows)

    local = select_rows(rows, plan.k, room, plan.takes_all)
    places, values = kernels.compact(rows, local.cut, room)
    messages = comm.all_to_all(form.write(places, values, stamp, local.lowest, local.largest), "split")
    if check is not None:
        check(messages, "split")
    arrived = form.read(messages)
    sums = acc.new_zeros(layout.span + 1)
    for source in range(plan.world):  # in rank order, so that the sum is the same in every run
        sums.index_add_(0, arrived.places[source], arrived.values[source])
    sums = sums[:-1][None]

    won_here = select_overall(plan, comm, sums, arrived.lowest, arrived.largest, local.nonfinite, checksum)
    win_places, win_values = kernels.compact(sums, won_here.cut, room)
    own = form.write(win_places, win_values, stamp, local.lowest * 0, local.largest * 0)
    gathered = comm.all_gather(own[0], "gather")
    if check is not None:
        check(gathered, "gather")
    winners = form.read(gathered)

    out = rows.new_zeros(plan.world, layout.span + 1).scatter_(1, winners.places, winners.values)[:, :-1]
    won = _mark(winners.places, layout.span)
    sent_values, sent_places = form.seen(values), places.long()
    sent = rows.new_zeros(plan.world, layout.span + 1).scatter_(1, sent_places, sent_values)[:, :-1]
    left = won & _mark(sent_places, layout.span)
    leaving = torch.where(left, sent, 0.0)
    if plan.code is not ValueCode.FP32:  # the owner of a sum keeps what its rounding loses
        mine = torch.arange(plan.world, device=acc.device)[:, None] == plan.rank
        leaving = leaving + torch.where(mine & won, out - sums, 0.0)
    strangers = (arrived.stamp != stamp).any() | (winners.stamp != stamp).any()
    return StaticResult(
        layout.flat(out), layout.flat(won), layout.flat(leaving), layout.flat(left), won_here.nonfinite,
        checksum_of(gathered), won_here.differs | strangers, (places < layout.span).sum(), local.lowest,
        won_here.low,
    )  # fmt: skip


def _mark(places: Tensor, span: int) -> Tensor:
    marks = torch.zeros(places.shape[0], span + 1, dtype=torch.bool, device=places.device)
    return marks.scatter_(1, places, torch.ones((), dtype=torch.bool, device=places.device).expand(places.shape))[
        :, :-1
    ]


class LocalSelection(NamedTuple):
    """What a rank selects, and what it tells others of it: magnitudes as bits, 0-d."""

    cut: Cut
    nonfinite: Tensor
    lowest: Tensor
    """The threshold; 0 if there is nothing to select."""
    largest: Tensor


def select_rows(rows: Tensor, k: int, room: int, takes_all: bool) -> LocalSelection:
    """The cut that takes the k largest entries of all rows, or all if there are fewer; `room` of a row at most.

    Exact but for the boundary bin, an 8192th of an octave: there each row gives its first ones, in equal shares. A
    row that has too many gives its largest, by bins of an eighth of an octave.
    """
    kernels = slot_kernels(rows)
    coarse = suffix_sums(kernels.count_coarse(rows))  # [R, COARSE]: entries in this bin or above
    total = coarse.sum(0, dtype=torch.int32)
    nonfinite = total[INFINITY_BITS >> COARSE_BITS] > 0
    largest = ((total > 0).sum(dtype=torch.int32) << COARSE_BITS).clamp(max=INFINITY_BITS - 1)
    if takes_all:
        zeros = torch.zeros(rows.shape[0], dtype=torch.int32, device=rows.device)
        return LocalSelection(Cut(zeros, zeros, zeros), nonfinite, zeros[0], largest)
    target = total[_FIRST_COARSE].clamp(max=k)
    place = last_at_least(total, target).clamp(min=_FIRST_COARSE)
    above = column(coarse, place + 1)
    fine = suffix_sums(kernels.count_fine(rows, place)) + above[:, None]
    inner = last_at_least(fine.sum(0, dtype=torch.int32), target)
    low = (place << COARSE_BITS) + (inner << FINE_BITS)
    sure = torch.where(inner + 1 < FINE, column(fine, inner + 1), above)
    edge = column(fine, inner) - sure
    quota = torch.minimum(share_out(target - sure.sum(dtype=torch.int32), edge), (room - sure).clamp(min=0))
    overflows = sure > room
    first = (coarse > room).sum(1, dtype=torch.int32)  # the first bin from which on a row's entries fit
    cut = Cut(
        torch.where(overflows, torch.maximum(low, (first - 1) << COARSE_BITS), low),
        torch.where(overflows, first << COARSE_BITS, low + (1 << FINE_BITS)),
        torch.where(overflows, room - coarse.gather(1, first.long()[:, None])[:, 0], quota),
    )
    return LocalSelection(cut, nonfinite, torch.where(target > 0, low, 0), largest)


class OverallSelection(NamedTuple):
    """What of this rank's sums wins, and what all ranks know after the same round; all but `cut` are 0-d."""

    cut: Cut
    nonfinite: Tensor
    differs: Tensor
    low: Tensor


def select_overall(
    plan: StaticPlan, comm: FixedCollectives, sums: Tensor, lowest: Tensor, largest: Tensor, nonfinite: Tensor,
    checksum: Tensor,
) -> OverallSelection:  # fmt: skip
    """The cut of this rank's sums, [1, span], that takes the k largest of all ranks' sums.

    `lowest` and `largest` are what each rank has told, the same everywhere: they place the window in which one
    histogram of bits, added up over all ranks, finds the threshold.
    """
    window = Window.around(lowest.amax(), largest.amax(), plan.world)
    bits = magnitude_bits(sums)
    bad = nonfinite | (bits >= INFINITY_BITS).any()
    own = window.count(bits)
    counts = torch.cat([bad.int()[None], own])
    comm.all_reduce_(counts, "histogram")
    mine, overall = suffix_sums(own[None]), suffix_sums(counts[None, 1:])[0]
    target = overall[1].clamp(max=plan.k)  # bin 0 has what is below the smallest normal number
    place = last_at_least(overall, target).clamp(min=1)
    low, top = window.edge(place), window.edge(place + 1)
    sure, edge = column(mine, place + 1)[0], (column(mine, place) - column(mine, place + 1))[0]
    told = torch.stack([edge.long(), checksum]).view(torch.uint8)
    others = comm.all_gather(told, "counts", control=True).view(torch.int64)
    shares = share_out(target - column(overall[None], place + 1)[0], others[:, 0].clamp(0, plan.size).int())
    quota = torch.minimum(shares[plan.rank], (plan.room - sure).clamp(min=0))
    overflows, first = sure > plan.room, (mine[0] > plan.room).sum(dtype=torch.int32)
    cut = Cut(
        torch.where(overflows, torch.maximum(low, window.edge((first - 1).clamp(min=0))), low)[None],
        torch.where(overflows, window.edge(first), top)[None],
        torch.where(overflows, plan.room - column(mine, first)[0], quota)[None],
    )
    if plan.takes_all:
        cut, low = Cut(*(torch.zeros_like(part) for part in cut)), torch.zeros_like(low)
    return OverallSelection(cut, counts[0] > 0, (others[:, 1] != checksum).any(), low)


@dataclass(frozen=True)
class OkTopkStatic(Algorithm):
    """Slots sent per rank: 1.5 k (P-1)/P to split and as many to gather, of 4 bytes with 16-bit values.

    Messages: 2(P-1) of one size, and a histogram of 4 kB. Exactly k entries are selected, here and of all sums, as
    far as there are so many and a row has room for its own. Values are fp32, fp16, bf16 or e4m3.

    Args:
        resident: Whether front ends exchange by the collectives of the device, without the host. None is yes on
            GPUs whose process group can (nccl), and no on CPUs.
    """

    name: ClassVar[str] = "oktopk-static"
    takes_plugins: ClassVar[bool] = False
    resident: bool | None = None

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: int | None) -> Reduction:
        """One step over messages in host memory, for any communicator."""
        plan = StaticPlan(acc.size, k, comm.rank, comm.world, self._code(comm))
        values = acc.values
        checksum = torch.full((), int(state or 0), dtype=torch.int64, device=values.device)

        def check(messages: Tensor, phase: str) -> None:
            with comm.stopwatch.stage("decode"):
                for peer in range(comm.world):
                    plan.format.check(messages[peer : peer + 1].cpu(), comm.transport.global_rank(peer), phase)
                if phase == "gather":
                    comm.digest.add(messages.cpu().contiguous().view(-1))

        stamp = (comm.step * 8191 + comm.bucket) % 2**31
        result = static_step(plan, OverMessages(comm.transport), values, checksum, stamp, check)
        comm.check_finite(not bool(result.nonfinite))
        if comm.nonfinite:
            return skip(state)
        winners = _vector(result.won, result.sums)
        left = _vector(result.left | (result.leaving != 0), result.leaving)
        low, global_low = torch.stack([result.low, result.global_low]).int().view(torch.float32).tolist()
        return Reduction(
            parts=[winners], leaving=[left], state=int(result.checksum), local_count=int(result.local_count),
            threshold=low, global_threshold=global_low, exact=True, global_exact=True,
        )  # fmt: skip

    @staticmethod
    def _code(comm: SparseCommunicator) -> ValueCode:
        if not isinstance(comm.values, ValueCode):
            raise ValueError(
                f"oktopk-static writes values on the device: fp32, fp16, bf16 or e4m3, not {comm.values!r}"
            )
        return comm.values

    def state_problem(self, state: object, size: int) -> str | None:
        return None if type(state) is int and -(2**63) <= state < 2**63 else foreign_state(state)

    def pack_state(self, state: Any) -> Any:
        return None if state is None else int(state)  # it may be on the device


def _vector(where: Tensor, values: Tensor) -> SparseVector:
    index = where.nonzero().flatten()
    return SparseVector(index.int() if where.numel() < 2**31 else index, values[index], where.numel())
