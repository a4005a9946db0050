"""Those who take part: a DDP model each, with a hook of its own, or a limit; and what one step of it costs."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.frontends.ddp import OkTopkState
from oktopk.metrics.sinks import MemorySink

from .limits import LinkLimit, MemoryLimit
from .names import AUTO_DENSE, BACKWARD, BF16, DDP, FP16, MEMORY, POWERSGD, limited, ours
from .plan import Plan
from .turns import Reduced, Turn, take_turn
from .workloads import Workload

_ONE_BUCKET = 1e6
"""Megabytes that no model has."""
_POWERSGD_START = 2
"""The least that torch allows; steps before are dense."""


class Contender(Protocol):
    """Somebody who takes turns with the others."""

    def turn(self) -> Turn: ...

    def close(self) -> None: ...


class Averaging:
    """One way to average the gradients, as a DDP model with its hook."""

    def __init__(self, name: str, workload: Workload, plan: Plan) -> None:
        self.workload, self.in_lab = workload, plan.in_lab
        self.model = DistributedDataParallel(
            workload.replica(),
            bucket_cap_mb=_ONE_BUCKET if name == POWERSGD else plan.bucket_mb,
            gradient_as_bucket_view=True,
        )
        self.memory = MemorySink(limit=1)
        self.state: OkTopkState | None = None
        own = ours(name, plan.values)
        if own is not None:
            state = OkTopkState(
                algorithm=own.algorithm, density=plan.density, values=own.values, auto=own.auto, join=own.join,
                warmup_steps=AUTO_DENSE if own.auto else 0, sinks=[self.memory], timeout=plan.timeout,
                ranks_per_host=plan.ranks_per_host if own.hosts else 1,
            )  # fmt: skip
            self.state = state.register(self.model)
        else:
            _CONNECT[name](self.model)

    def turn(self) -> Turn:
        """One step: the backward pass with all that is exchanged."""
        self.model.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.model)
        return take_turn(loss.backward, self.in_lab, self._told)

    def _told(self, start: float) -> Reduced:
        return Reduced() if self.state is None else Reduced.of(self.memory.steps[-1], start)

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def make_contender(name: str, workload: Workload, plan: Plan, sent: Mapping[str, int]) -> Contender:
    """`sent` has what the others have sent in their last turns."""
    whose = limited(name)
    if whose is not None:
        return LinkLimit(lambda: sent.get(whose, 0), plan.in_lab)
    if name == MEMORY:
        return MemoryLimit(workload.size, plan.in_lab)
    return Averaging(name, workload, plan)


def _nothing(state: None, bucket: GradBucket) -> Future[Tensor]:
    """What a hook must do at least."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _bf16(state: None, bucket: GradBucket) -> Future[Tensor]:
    """torch's hook by another name: by its own, DDP takes it with NCCL only, though gloo sums bf16 as well."""
    future: Future[Tensor] = bf16_compress_hook(state, bucket)  # type: ignore[arg-type]
    return future


def _power_sgd(model: DistributedDataParallel) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=_POWERSGD_START)
    model.register_comm_hook(state, powerSGD_hook)


_CONNECT: dict[str, Callable[[DistributedDataParallel], None]] = {
    BACKWARD: lambda model: model.register_comm_hook(None, _nothing),
    DDP: lambda model: None,
    FP16: lambda model: model.register_comm_hook(None, fp16_compress_hook),
    BF16: lambda model: model.register_comm_hook(None, _bf16),
    POWERSGD: _power_sgd,
}
