"""The judge: a case has ended with errors that say enough, or gone on as if nothing had happened, or is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oktopk import OkTopkError
from stress.chaos.cases import Job
from stress.chaos.faults import Burned, Death, Fault
from stress.chaos.jobs import Report, Step
from tests.support import stepping

ENDED, WENT_ON, HANG, WRONG, LEAK = "ended with a named error", "went on correctly", "hang", "wrong", "leak"
CHANGED = "went on with a changed sum"
"""Of gloo's own connections only, whose bytes nobody checks."""
ABORTED = "ended with an abort inside gloo"
"""Likewise: gloo ends the process when it meets a header that cannot be."""
MISSED = "the fault did not happen"
NAMED = {"a rank": r"rank \d+", "the operation": r"\w+ \([\w ]+\)"}
"""What an error must say, beside which rank says so in which step: who, and where."""
OF_A_RANK = ("raise", "die", "die with a child", "die with a loader", "stop", "link down")
"""After these, somebody has to name the rank."""


class GlooAbort(RuntimeError):
    """What ended a rank whose process gloo has aborted."""


@dataclass(frozen=True)
class Verdict:
    """How the case of that number went, and what is wrong about it."""

    number: int
    kind: str
    went: str
    what: str = ""
    late: float = -math.inf
    """Seconds from the fault to the last error, beyond the timeout."""


def judge(
    job: Job,
    fault: Fault,
    undisturbed: Sequence[Report],
    disturbed: Sequence[Report],
    harmless: bool,
    nameable: bool = True,
) -> tuple[str, str]:
    """How it went, and what is wrong with that. If not `nameable`, nobody can tell who is missing in a sum."""
    if disturbed[fault.rank].struck is None:
        return MISSED, f"rank {fault.rank} has not come to {fault.moment}"
    if problem := unlawful(disturbed, job.ranks_per_host):
        return WRONG, problem
    if not job.auto and (problem := different(undisturbed, disturbed)):  # auto goes by the clock
        return WRONG, problem
    failed = {rank: report.error for rank, report in enumerate(disturbed) if report.error is not None}
    if failed and harmless:
        return WRONG, f"a fault that does no harm has ended ranks: {failed}"
    if problem := unnamed(job, fault, disturbed, nameable):
        return WRONG, problem
    return (ENDED if failed else WENT_ON), ""


def judge_sums(
    job: Job, fault: Fault, undisturbed: Sequence[Report], disturbed: Sequence[Report], harmless: bool
) -> tuple[str, str]:
    """The same where the bytes of gloo's sums were disturbed: a sum may be wrong, and gloo may abort a rank."""
    if disturbed[fault.rank].struck is None:
        return MISSED, f"rank {fault.rank} has not come to {fault.moment}"
    changed = different(undisturbed, disturbed) or unlawful(disturbed, job.ranks_per_host)
    failed = {rank: report.error for rank, report in enumerate(disturbed) if report.error is not None}
    if harmless and (changed or failed):
        return WRONG, f"a fault that does no harm: {changed}, {failed}"
    if problem := unnamed(job, fault, disturbed, nameable=False):
        return WRONG, problem
    if aborted := [str(error) for error in failed.values() if isinstance(error, GlooAbort)]:
        return ABORTED, aborted[0]
    return (ENDED if failed else CHANGED if changed else WENT_ON), ""


def unlawful(reports: Sequence[Report], ranks_per_host: int = 1) -> str | None:
    """What ranks were given as the result of a step is the same for all; and no mass is lost."""
    for number in range(max(len(report.steps) for report in reports)):
        step = [report.steps[number] for report in reports if len(report.steps) > number]
        if any(not same_bits(one, step[0]) or one.skipped != step[0].skipped for one in step):
            return f"replicas differ after step {number}"
        if len(step) == len(reports) and not conserved(step, ranks_per_host):
            return f"mass is lost in step {number}"
    return None


def same_bits(one: Step, other: Step) -> bool:
    return torch.equal(stepping.bits(one.result), stepping.bits(other.result))


def conserved(step: Sequence[Step], ranks_per_host: int) -> bool:
    """Entry by entry, to the rounding of float32. A host is one rank that is given the mean of its ranks'.

    In a step that is skipped, buckets that came before the bad one keep what they were given, the others do not.
    """
    world = len(step)
    before, given, after = (
        torch.stack([getattr(one, name) for one in step]).double() for name in ("before", "given", "after")
    )
    given /= ranks_per_host
    lost = (before + given - after).sum(0) - world // ranks_per_host * step[0].result.double()
    tolerance = 8 * world * stepping.EPSILON * (before.abs() + given.nan_to_num().abs()).sum(0)
    fine = lost.abs() <= tolerance + torch.finfo(torch.float32).tiny
    if step[0].skipped:
        fine |= (before == after).all(0)
        fine &= ~torch.stack([one.result for one in step]).any(0)
    return bool(fine.all())


def different(undisturbed: Sequence[Report], disturbed: Sequence[Report]) -> str | None:
    """Every step that was done came out as it does without the fault."""
    for rank, (one, other) in enumerate(zip(undisturbed, disturbed, strict=True)):
        for number, (was, now) in enumerate(zip(one.steps, other.steps, strict=False)):
            if not same_bits(was, now):
                return f"rank {rank} has another result in step {number} than without the fault"
            if not torch.equal(stepping.bits(was.after), stepping.bits(now.after)):
                return f"rank {rank} has another residual after step {number} than without the fault"
    return None


def unnamed(job: Job, fault: Fault, reports: Sequence[Report], nameable: bool) -> str | None:
    """Who has not done all steps has an error that says who, where and when; somebody names who is lost."""
    said = []
    for rank, report in enumerate(reports):
        done, error = len(report.steps), report.error
        if error is None and done < job.steps:
            return f"rank {rank} ended without an error after {done} steps"
        own = rank == fault.rank and isinstance(error, (Burned, Death))
        if error is None or own or isinstance(error, GlooAbort):
            continue
        if job.front_end == "ddp" and of_ddp(error) and any(isinstance(r.error, _REASONS) for r in reports):
            continue
        says, when, _ = str(error).rpartition(f" (rank {rank}, step {done})")
        if not when and done == 0 and "(agreement)" in str(error):  # about the arguments, before the first step
            says, when = str(error), "at the start"
        if not when:
            return f"rank {rank} ended in step {done}, and says {error!r}"
        missing = [what for what, pattern in NAMED.items() if not re.search(pattern, says)]
        if not nameable and "all_reduce (" in says:
            missing = [what for what in missing if what != "a rank"]
        if missing or not isinstance(error, OkTopkError):
            return f"the error of rank {rank} does not say {missing}: {error!r}"
        if rank != fault.rank:
            said.append(says)
    if fault.kind not in OF_A_RANK or not said or (not nameable and any("all_reduce (" in says for says in said)):
        return None
    known = any(re.search(rf"rank {fault.rank}\b", says) for says in said)
    return None if known else f"nobody names rank {fault.rank}: {said}"


_REASONS = (OkTopkError, Burned, Death)
"""What has ended some rank, if another one has only lost it."""


def of_ddp(error: BaseException) -> bool:
    """Whether DDP has lost a rank that has already ended: between steps it exchanges a little in torch's group."""
    return type(error) is RuntimeError and "gloo" in str(error)


def lateness(fault: Fault, reports: Sequence[Report], timeout: float) -> float:
    """How long after the fault the last of the others had its error, beyond the timeout."""
    ends = [report.ended for rank, report in enumerate(reports) if rank != fault.rank and report.error is not None]
    struck = reports[fault.rank].struck
    return max((end - struck - timeout for end in ends if end and struck), default=-math.inf)
