"""sparse_allreduce: the bare collective, over any algorithm and any communicator."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .algorithms import Algorithm, Reduction, find_algorithm
from .algorithms.base import reduce_step
from .algorithms.selection import target_count
from .comm import Communicator, Metered, Operation, Traffic, agree, default_communicator
from .errors import naming_step
from .feedback.accumulator import Accumulator, narrowed
from .wire.message import VALUE_CODES
from .wire.sparse_comm import SparseCommunicator


@dataclass(frozen=True)
class Info:
    """What one sparse_allreduce did on this rank."""

    algorithm: str
    size: int
    target: int
    """k, the number of entries the density stands for."""
    local_count: int
    """How many entries this rank selected."""
    result_count: int
    """How many entries of the result are not zero."""
    threshold: float
    global_threshold: float
    exact: bool
    """The local threshold was evaluated exactly on this step."""
    global_exact: bool
    skipped: bool
    """Some rank met a NaN or an infinity: the result is zero and every residual is as it was."""
    traffic: dict[Operation, Traffic]
    payload: Traffic
    control: Traffic
    state: Any
    """Pass it to the next call on the same tensor, so that thresholds and regions are followed."""


@torch.no_grad()
def sparse_allreduce(
    tensor: Tensor,
    density: float = 0.01,
    algorithm: str | Algorithm = "oktopk",
    residual: Tensor | None = None,
    comm: Communicator | None = None,
    *,
    values: str = "fp32",
    indices: str = "coded",
    out: Tensor | None = None,
    state: Any = None,
    step: int = 0,
) -> tuple[Tensor, Info]:
    """The mean of `tensor` over all ranks, made of the entries that matter.

    The residual (float32, as many entries as the tensor) is added to the tensor first and is updated in place:
    it keeps what was not sent. Without one, what is not sent is lost. The tensor may be of any floating type and
    shape; the result has the same. It goes into `out` if given, which may be the tensor itself.

    On the wire, `values` are fp32, bf16, fp16 or e4m3 (8 bits; the rounding error stays in the residual), and
    `indices` are coded, or raw: four bytes each, which makes an entry the two words of the literature.

    All ranks must call it with arguments that fit; a mistake on one rank is a ValueError on all of them.

    >>> import oktopk
    >>> def mean(comm):
    ...     tensor = torch.tensor([0.0, 4.0, 0.1, 0.0]) * (comm.rank + 1)
    ...     return oktopk.sparse_allreduce(tensor, density=0.25, comm=comm)[0].tolist()
    >>> oktopk.run_threads(2, mean)
    [[0.0, 6.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]]
    """
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm must be an oktopk.Communicator, got {type(comm).__name__}")
    meter = Metered(default_communicator() if comm is None else comm)
    problem = _problem(tensor, density, algorithm, residual, values, indices, out, state, step)
    dtype, size = (tensor.dtype, tensor.numel()) if isinstance(tensor, Tensor) else (None, None)
    terms = {
        "tensor size": size,
        "dtype": dtype,
        "density": density,
        "algorithm": repr(algorithm),
        "values": values,
        "indices": indices,
        "residual": "none" if residual is None else "given",
        "state": getattr(state, "shared", type(state).__name__),
        "step": step,
    }
    with naming_step(meter.rank, step):
        agree(meter, terms, problem)
    chosen = find_algorithm(algorithm)
    acc = Accumulator(_work_buffer(tensor, out), None if residual is None else residual.view(-1))
    k = target_count(acc.size, density)
    channel = SparseCommunicator(
        meter,
        acc.size,
        step=step,
        values=VALUE_CODES[values],
        raw_indices=indices == "raw",
        device=acc.work.device,
    )
    with naming_step(meter.rank, step):
        reduction, found = reduce_step(chosen, channel, acc, k, state)
    if reduction.mean is not None:
        found = int(torch.count_nonzero(acc.work))
    mean = _returned(acc, tensor, meter)
    if out is not None:
        mean = out if out.data_ptr() == mean.data_ptr() else out.copy_(mean)
    return mean, _info(chosen, acc.size, k, reduction, found, meter)


def _work_buffer(tensor: Tensor, out: Tensor | None) -> Tensor:
    """The tensor in float32, in memory that may be overwritten: that of `out` if it will do."""
    if out is None or out.dtype != torch.float32 or not out.is_contiguous():
        return tensor.detach().to(torch.float32, copy=True).contiguous().view(-1)
    if out is not tensor:
        out.copy_(tensor)
    return out.detach().view(-1)


def _returned(acc: Accumulator, tensor: Tensor, comm: Communicator) -> Tensor:
    """The mean in the tensor's type and shape, never infinite; what the type cannot hold stays with rank 0."""
    if tensor.dtype in (torch.float32, torch.float64):
        return acc.work.view(tensor.shape).to(tensor.dtype)
    mean = narrowed(acc.work, tensor.dtype)
    if acc.residual is not None and comm.rank == 0:
        acc.residual.add_(acc.work - mean.float(), alpha=comm.world)
    return mean.view(tensor.shape)


def _info(chosen: Algorithm, size: int, k: int, reduction: Reduction, found: int, meter: Metered) -> Info:
    return Info(
        algorithm=chosen.name,
        size=size,
        target=k,
        local_count=reduction.local_count,
        result_count=found,
        threshold=reduction.threshold,
        global_threshold=reduction.global_threshold,
        exact=reduction.exact,
        global_exact=reduction.global_exact,
        skipped=reduction.skipped,
        traffic=meter.traffic,
        payload=meter.payload(),
        control=meter.control(),
        state=reduction.state,
    )


def _problem(
    tensor: Tensor,
    density: float,
    algorithm: str | Algorithm,
    residual: Tensor | None,
    values: str,
    indices: str,
    out: Tensor | None,
    state: object,
    step: int,
) -> str | None:
    """What is wrong with the arguments, and what to do about it."""
    if not isinstance(tensor, Tensor):
        return f"tensor must be a torch.Tensor, got {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"tensor must be dense, got layout {tensor.layout}: call to_dense() on it first"
    if not tensor.is_floating_point():
        return f"tensor must be of a floating type, got {tensor.dtype}: convert it first"
    if isinstance(density, bool) or not isinstance(density, Real) or not 0 < density <= 1:
        return f"density must be in (0, 1], got {density!r}"
    if not isinstance(values, str) or values not in VALUE_CODES:
        return f"unknown value format {values!r}: choose one of {', '.join(VALUE_CODES)}"
    if indices not in ("coded", "raw"):
        return f"unknown index format {indices!r}: choose coded or raw"
    if not isinstance(step, int) or step < 0:
        return f"step must be a number from 0 on, got {step!r}"
    try:
        chosen = find_algorithm(algorithm)
    except ValueError as error:
        return str(error)
    if state is not None and (problem := chosen.state_problem(state, tensor.numel())):
        return problem
    return _memory_problem(tensor, residual, out)


def _memory_problem(tensor: Tensor, residual: Tensor | None, out: Tensor | None) -> str | None:
    for name, given in (("out", out), ("residual", residual)):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            return f"{name} must be a torch.Tensor, got {type(given).__name__}"
        if given.layout is not torch.strided or given.device != tensor.device:
            return f"{name} must be dense and on the device of the tensor"
    if out is not None and (out.shape != tensor.shape or out.dtype != tensor.dtype):
        return f"out must be {tensor.dtype} of shape {tuple(tensor.shape)}, got {out.dtype} {tuple(out.shape)}"
    if residual is None:
        return None
    if residual.dtype != torch.float32 or residual.numel() != tensor.numel():
        return (
            f"residual must be float32 with {tensor.numel()} entries like the tensor, "
            f"got {residual.dtype} with {residual.numel()}"
        )
    if not residual.is_contiguous():
        return "residual must be contiguous"
    if tensor.numel() and residual.data_ptr() in (tensor.data_ptr(), 0 if out is None else out.data_ptr()):
        return "residual must have memory of its own"
    return None
