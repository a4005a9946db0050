"""Those who take part: a DDP model each, with a hook of its own, and what one step of it costs."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.algorithms import ALGORITHMS
from oktopk.ddp import OkTopkState
from oktopk.metrics import StepEvent
from oktopk.sinks import MemorySink

from .plan import BACKWARD, BF16, DDP, FP16, POWERSGD, Plan
from .workloads import Workload

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
_ONE_BUCKET = 1e6
"""Megabytes that no model has."""
_POWERSGD_START = 2
"""The least that torch allows; steps before are dense."""


@dataclass(frozen=True)
class Reduced:
    """What our own reducers tell about a step; torch's hooks tell nothing."""

    sent_bytes: int | None = None
    modelled_bytes: int | None = None
    exposed: float | None = None
    hidden_share: float | None = None
    stages: dict[str, float] | None = None

    @classmethod
    def of(cls, event: StepEvent) -> "Reduced":
        wire = event.wire
        return cls(wire.sent_bytes, wire.modelled_bytes, event.exposed, event.hidden_share, asdict(event.seconds))


@dataclass(frozen=True)
class Turn:
    """One step of one contender on one rank."""

    seconds: float
    cpu_seconds: float
    interface_bytes: int | None
    """Sent by this host while it lasted, as its interface has counted; None where there is no interface."""
    reduced: Reduced = Reduced()


class Contender:
    """One way to average the gradients."""

    def __init__(self, name: str, workload: Workload, plan: Plan) -> None:
        self.workload, self.in_lab = workload, plan.link is not None
        self.model = DistributedDataParallel(
            workload.replica(),
            bucket_cap_mb=_ONE_BUCKET if name == POWERSGD else plan.bucket_mb,
            gradient_as_bucket_view=True,
        )
        self.memory = MemorySink(limit=1)
        self.state: OkTopkState | None = None
        if name in ALGORITHMS:
            state = OkTopkState(
                algorithm=name, density=plan.density, values=plan.values, warmup_steps=0, auto=False,
                sinks=[self.memory], timeout=plan.timeout,
            )  # fmt: skip
            self.state = state.register(self.model)
        else:
            _CONNECT[name](self.model)

    def turn(self) -> Turn:
        """One step: the backward pass with all that is exchanged. Ranks begin it together, and leave together."""
        self.model.zero_grad(set_to_none=True)
        loss = self.workload.loss(self.model)
        dist.barrier()
        sent = self._sent()
        start, cpu = time.perf_counter(), time.process_time()
        loss.backward()  # type: ignore[no-untyped-call]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        dist.barrier()  # now what was sent has arrived, and is counted
        moved = None if sent is None else (self._sent() or 0) - sent
        return Turn(seconds, cpu, moved, Reduced.of(self.memory.steps[-1]) if self.state else Reduced())

    def close(self) -> None:
        if self.state is not None:
            self.state.close()

    def _sent(self) -> int | None:
        return int(_SENT.read_text()) if self.in_lab else None


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
