"""PyTorch's own ways to average gradients, by name: plain DDP and its communication hooks."""

from collections.abc import Callable

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

DDP, FP16, BF16, POWERSGD = "ddp", "ddp-fp16", "ddp-bf16", "powersgd"
ONE_BUCKET = 1e6
"""Bucket size in MB that exceeds any model, for PowerSGD."""


def _bf16(state: None, bucket: GradBucket) -> Future[Tensor]:
    """torch's hook under another name: DDP accepts the original with NCCL only, although gloo can sum bf16."""
    future: Future[Tensor] = bf16_compress_hook(state, bucket)  # type: ignore[arg-type]
    return future


def register_power_sgd(
    model: DistributedDataParallel, rank: int, start: int, min_compression_rate: float = 2
) -> PowerSGDState:
    """Register PowerSGD with a model and return its state.

    Args:
        model: a model with one bucket (`ONE_BUCKET`).
        rank: of the matrices that approximate a gradient.
        start: number of dense steps before; torch needs at least 2.
        min_compression_rate: matrices that shrink by less than this stay dense.
    """
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=start, min_compression_rate=min_compression_rate
    )
    model.register_comm_hook(state, powerSGD_hook)
    return state


HOOKS: dict[str, Callable[[DistributedDataParallel], object]] = {
    DDP: lambda model: None,
    FP16: lambda model: model.register_comm_hook(None, fp16_compress_hook),
    BF16: lambda model: model.register_comm_hook(None, _bf16),
}
"""Functions that register a hook without a state."""
