"""What the ranks of a case do, step by step, with a note of everything that the laws are about."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from stress.chaos.cases import Job
from stress.chaos.faults import Faulty, Moment
from tests.support import stepping

_CAP = 0.0004
"""MB of a bucket of DDP's: a hundred entries."""


@dataclass(frozen=True)
class Step:
    """One step on one rank: all parameters as one vector."""

    before: Tensor
    given: Tensor
    result: Tensor
    after: Tensor
    skipped: bool


@dataclass
class Report:
    """What became of one rank."""

    steps: list[Step] = field(default_factory=list)
    error: BaseException | None = None
    moments: list[Moment] = field(default_factory=list)
    struck: float | None = None
    """When its fault has happened, if it has one; `ended`, when all was over for it. By time.monotonic()."""
    ended: float | None = None


def take_part(job: Job, comm: Faulty, report: Report) -> None:
    """All steps of one rank. An error is noted, and raised."""
    report.moments = comm.moments
    try:
        FRONT_ENDS[job.front_end](job, comm, report.steps)
    except BaseException as error:
        report.error = error
        raise
    finally:
        report.struck, report.ended = comm.struck, time.monotonic()


def with_reducer(job: Job, comm: Faulty, done: list[Step]) -> None:
    """The reducer with its worker thread, as training uses it."""
    with stepping.reducer_on(comm, job.algorithm, **job.options()) as reducer:
        before = torch.zeros(stepping.SIZE)
        for step in range(job.steps):
            comm.step = step
            grads = gradients(job, comm.rank, step)
            given = flat(grads)
            result = flat(reducer.sync(grads))
            after = stepping.flat(reducer.state_dict()["residuals"]).float()
            done.append(Step(before, given, result, after, reducer.skipped))
            before = after


def with_collective(job: Job, comm: Faulty, done: list[Step]) -> None:
    """The bare collective, with a residual and a state that the caller carries along."""
    residual, state = torch.zeros(stepping.SIZE), None
    for step in range(job.steps):
        comm.step = step
        given, before = flat(gradients(job, comm.rank, step)), residual.clone()
        mean, info = oktopk.sparse_allreduce(
            given, job.density, job.algorithm, residual, comm, values=job.values, state=state, step=step
        )
        state = info.state
        done.append(Step(before, given, mean, residual.clone(), info.skipped))


class Linear(nn.Module):
    """The sum of all parameters times what is given: that becomes the gradient, to the bit."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in stepping.parameters().items():
            self.register_parameter(name, parameter)

    def forward(self, grads: stepping.Grads) -> Tensor:
        return torch.stack([(parameter * grads[name]).sum() for name, parameter in self.named_parameters()]).sum()


def with_ddp(job: Job, comm: Faulty, done: list[Step]) -> None:
    """The hook of DDP: in DDP's own buckets, which are several from the second step on, or in one of its own."""
    model = DistributedDataParallel(Linear(), bucket_cap_mb=_CAP)
    options = job.options() | {"buckets": "model" if job.buckets == "model" else None}
    with (
        mock.patch.object(oktopk.GroupCommunicator, "exclusive", return_value=comm),
        oktopk.OkTopkState(algorithm=job.algorithm, **options) as state,
    ):
        state.register(model)
        before = torch.zeros(stepping.SIZE)
        for step in range(job.steps):
            comm.step = step
            grads = gradients(job, comm.rank, step)
            model.zero_grad()
            model(grads).backward()
            result = flat({name: parameter.grad for name, parameter in model.module.named_parameters()})
            after = stepping.flat(state.state_dict()["residuals"]).float()
            done.append(Step(before, flat(grads), result, after, state.skipped))
            before = after


FRONT_ENDS: dict[str, Callable[[Job, Faulty, list[Step]], None]] = {
    "reducer": with_reducer,
    "collective": with_collective,
    "ddp": with_ddp,
}


def gradients(job: Job, rank: int, step: int) -> stepping.Grads:
    grads = stepping.gradients(rank, step)
    if step == job.spoilt_step and rank == 1:
        grads["c"][3] = float("nan")
    return grads


def flat(named: stepping.Grads) -> Tensor:
    return torch.cat([named[name].flatten() for name in stepping.SHAPES])
