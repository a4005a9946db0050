"""The contenders: each is a DDP model with its own hook, or a lower limit; both can time one step."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.frontends.ddp import OkTopkState
from oktopk.metrics.sinks import MemorySink
from oktopk.tools.hooks import HOOKS, ONE_BUCKET, POWERSGD, register_power_sgd

from .limits import LinkLimit, MemoryLimit
from .names import AUTO_DENSE, BACKWARD, MEMORY, link_limit_target, parse_contender
from .plan import Plan
from .steps import ReducerReport, TimedStep, time_step
from .workloads import Workload

_POWERSGD_START = 2
"""The smallest value that torch allows; earlier steps are dense."""


class Contender(Protocol):
    """Something whose steps are timed in turn with those of others."""

    def step(self) -> TimedStep: ...

    def close(self) -> None: ...


class DdpContender:
    """A DDP model with the hook that averages its gradients."""

    def __init__(self, name: str, workload: Workload, plan: Plan) -> None:
        self.workload, self.in_lab = workload, plan.in_lab
        self.model = DistributedDataParallel(
            workload.replica(),
            bucket_cap_mb=ONE_BUCKET if name == POWERSGD else plan.bucket_mb,
            gradient_as_bucket_view=True,
        )
        self.memory = MemorySink(limit=1)
        self.state: OkTopkState | None = None
        own = parse_contender(name, plan.values)
        if own is not None:
            given = {"density": plan.density, "warmup_steps": AUTO_DENSE if own.auto else 0, **own.options}
            state = OkTopkState(
                algorithm=own.algorithm, values=own.values, auto=own.auto, fusion_entries=own.fusion_entries,
                sinks=[self.memory], timeout=plan.timeout,
                ranks_per_host=plan.ranks_per_host if own.hosts else 1, **given,
            )  # fmt: skip
            self.state = state.register(self.model)
        else:
            _CONNECT[name](self.model)

    def step(self) -> TimedStep:
        """Time one backward pass with its gradient exchange."""
        self.model.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.model)
        return time_step(loss.backward, self.in_lab, self._report)

    def _report(self, start: float) -> ReducerReport:
        return ReducerReport() if self.state is None else ReducerReport.of(self.memory.steps[-1], start)

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def make_contender(name: str, workload: Workload, plan: Plan, sent: Mapping[str, int]) -> Contender:
    """Make a contender by name; `sent` holds the bytes that each contender sent in its last step."""
    target = link_limit_target(name)
    if target is not None:
        return LinkLimit(lambda: sent.get(target, 0), plan.in_lab)
    if name == MEMORY:
        return MemoryLimit(workload.size, plan.in_lab)
    return DdpContender(name, workload, plan)


def _no_exchange(state: None, bucket: GradBucket) -> Future[Tensor]:
    """A hook that returns the local gradients."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


_CONNECT: dict[str, Callable[[DistributedDataParallel], object]] = {
    BACKWARD: lambda model: model.register_comm_hook(None, _no_exchange),
    POWERSGD: lambda model: register_power_sgd(model, rank=1, start=_POWERSGD_START),
    **HOOKS,
}
