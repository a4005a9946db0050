"""sparse_allreduce: the collective alone, with any algorithm over any communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithms import Algorithm, Reduction, find_algorithm
from .algorithms.base import digest_of, reduce_step
from .algorithms.selection import target_count
from .comm import Communicator, Metered, Operation, Traffic, agree, default_communicator, post_digest
from .errors import CommError, add_step_to_errors
from .feedback.accumulator import Accumulator, narrow
from .utils.registry import PluginError
from .wire.codecs import ValueCodec, describe_values, find_values
from .wire.sparse_comm import SparseCommunicator

_given_up: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Why a communicator, or the default process group, cannot be used any more."""


@dataclass(frozen=True)
class Info:
    """What one sparse_allreduce did on this rank.

    Attributes:
        algorithm: Name of the algorithm.
        size: Entries of the tensor.
        target: k, the number of entries that the density asks for.
        local_count: Entries that this rank selected.
        result_count: Non-zero entries of the result.
        threshold: Magnitude from which on this rank selected.
        global_threshold: Magnitude from which on sums survived, for Ok-Topk; otherwise 0.
        exact: The local threshold was evaluated exactly on this step.
        global_exact: The global threshold was evaluated exactly on this step.
        skipped: Some rank had a non-finite number. The result is zero and every residual is unchanged.
        traffic: Bytes, messages and seconds by operation.
        payload: The part of the traffic that carried gradient.
        control: The part that did not: counts, region edges, agreement.
        state: Pass it to the next call on the same tensor, so that thresholds and regions are tracked.

    Example:
        >>> import oktopk
        >>> import torch
        >>> _, info = oktopk.sparse_allreduce(torch.arange(100.0), density=0.05)
        >>> info.algorithm, info.target, info.local_count, info.skipped
        ('oktopk', 5, 5, False)
    """

    algorithm: str
    size: int
    target: int
    local_count: int
    result_count: int
    threshold: float
    global_threshold: float
    exact: bool
    global_exact: bool
    skipped: bool
    traffic: dict[Operation, Traffic]
    payload: Traffic
    control: Traffic
    state: Any


@torch.no_grad()
def sparse_allreduce(
    tensor: Tensor,
    density: float = 0.01,
    algorithm: str | Algorithm = "oktopk",
    residual: Tensor | None = None,
    comm: Communicator | None = None,
    *,
    values: str | ValueCodec = "fp32",
    indices: str = "coded",
    out: Tensor | None = None,
    state: Any = None,
    step: int = 0,
) -> tuple[Tensor, Info]:
    """Average `tensor` over all ranks by a sparse all-reduce with error feedback.

    Every rank must call it with matching arguments. A wrong argument on one rank raises on every rank, and the
    call may be repeated. After any other error, Ctrl-C included, ranks may differ: the communicator cannot be used
    any more on this rank, and the others get an error.

    Args:
        tensor: Dense, of any floating-point dtype and any shape.
        density: Share of the entries to send, in (0, 1].
        algorithm: A name from oktopk.ALGORITHMS, or an Algorithm instance with other hyper-parameters.
        residual: Error feedback: float32, contiguous, with as many entries as the tensor. It is added to the
            tensor before the selection and updated in place to keep what was not sent. Without it, unsent entries
            are lost.
        comm: Communicator; by default that of torch.distributed or, if it is not initialised, this process alone.
        values: Format of values on the wire: fp32, bf16, fp16, e4m3 (8 bits), that of a plug-in, or a ValueCodec.
            Rounding errors stay in the residual.
        indices: Format of indices on the wire: coded (about one byte each), or raw (four bytes each, as the
            literature counts).
        out: Tensor for the result, of the tensor's dtype and shape; may be the tensor itself.
        state: `info.state` of the last call on this tensor, so that thresholds and regions are tracked.
        step: Number of the step, for messages and errors.

    Returns:
        The mean, in the tensor's dtype and shape, and the Info of this call. The mean is zero outside the entries
        that were exchanged.

    Raises:
        ValueError: An argument is wrong, or arguments differ between ranks.
        CommError: Communication failed.

    Example:
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
    with _failing_together(meter, comm):
        return _sparse_allreduce(
            meter, tensor, density, algorithm, residual, values=values, indices=indices, out=out, state=state,
            step=step,
        )  # fmt: skip


class _Agreed(Exception):
    """A wrong argument, which all ranks have found."""


@contextmanager
def _failing_together(meter: Metered, given: Communicator | None) -> Iterator[None]:
    """After an error in the block that other ranks do not share, no rank goes on with the communicator.

    Every call without a communicator makes a new one; there it is the process group that must not be used again.
    """
    shared = given if given is not None else dist.group.WORLD if dist.is_initialized() else None
    if shared is not None and shared in _given_up:
        raise CommError(_given_up[shared])
    try:
        yield
    except _Agreed as agreed:
        raise agreed.args[0] from None
    except BaseException as error:
        if shared is not None:
            _given_up[shared] = (
                f"an earlier sparse_allreduce did not come to its end on this rank ({error!r}), which may have "
                "diverged. Restart from the last checkpoint"
            )
        interrupted = None if isinstance(error, Exception) else CommError(f"interrupted mid-step by {error!r}")
        meter.fail(interrupted or error)
        raise


def _sparse_allreduce(
    meter: Metered,
    tensor: Tensor,
    density: float,
    algorithm: str | Algorithm,
    residual: Tensor | None,
    *,
    values: str | ValueCodec,
    indices: str,
    out: Tensor | None,
    state: Any,
    step: int,
) -> tuple[Tensor, Info]:
    problem = (
        _tensor_problem(tensor)
        or _setting_problem(density, values, indices, step)
        or _algorithm_problem(algorithm, state, tensor)
        or _memory_problem(tensor, residual, out)
    )
    dtype, size = (tensor.dtype, tensor.numel()) if isinstance(tensor, Tensor) else (None, None)
    terms = {
        "tensor size": size,
        "dtype": dtype,
        "density": density,
        "algorithm": repr(algorithm),
        "values": values if problem else describe_values(values),
        "indices": indices,
        "residual": "none" if residual is None else "given",
        "state": getattr(state, "shared", type(state).__name__),
        "step": step,
    }
    with add_step_to_errors(meter.rank, step):
        try:
            agree(meter, terms, problem)
        except ValueError as error:
            raise _Agreed(error) from error
    chosen = find_algorithm(algorithm)
    work = _work_buffer(tensor, out)
    acc = Accumulator([work], [] if residual is None else [residual.view(-1)])
    k = target_count(acc.size, density)
    channel = SparseCommunicator(
        meter, acc.size, step=step, values=find_values(values), raw_indices=indices == "raw"
    )

    def confirm(reduction: Reduction) -> None:
        if meter.world > 1:
            post_digest(meter, digest_of(channel, reduction), "their results")()

    with add_step_to_errors(meter.rank, step):
        reduction, found = reduce_step(chosen, channel, acc, k, state, confirm=confirm)
    if reduction.mean is not None:
        found = int(torch.count_nonzero(work))
    mean = _convert_mean(work, residual, tensor, meter)
    if out is not None:
        mean = out if out.data_ptr() == mean.data_ptr() else out.copy_(mean)
    return mean, _info(chosen, acc.size, k, reduction, found, meter)


def _work_buffer(tensor: Tensor, out: Tensor | None) -> Tensor:
    """Copy the tensor as float32 into memory that may be overwritten: that of `out` if it fits."""
    if out is None or out.dtype != torch.float32 or not out.is_contiguous():
        return tensor.detach().to(torch.float32, copy=True).contiguous().view(-1)
    if out is not tensor:
        out.copy_(tensor)
    return out.detach().view(-1)


def _convert_mean(work: Tensor, residual: Tensor | None, tensor: Tensor, comm: Communicator) -> Tensor:
    """The mean in the tensor's dtype and shape, never infinite. Rank 0 keeps the rounding error as residual."""
    if tensor.dtype in (torch.float32, torch.float64):
        return work.view(tensor.shape).to(tensor.dtype)
    mean = narrow(work, tensor.dtype)
    if residual is not None and comm.rank == 0:
        residual.view(-1).add_(work - mean.float(), alpha=comm.world)
    return mean.view(tensor.shape)


def _info(chosen: Algorithm, size: int, k: int, reduction: Reduction, found: int, meter: Metered) -> Info:
    same = {field.name: getattr(reduction, field.name) for field in fields(Info) if hasattr(reduction, field.name)}
    return Info(
        algorithm=chosen.name,
        size=size,
        target=k,
        result_count=found,
        traffic=meter.traffic,
        payload=meter.payload(),
        control=meter.control(),
        **same,
    )


def _tensor_problem(tensor: Tensor) -> str | None:
    """Say what is wrong with an argument and how to fix it, as the next ones; None if nothing is."""
    if not isinstance(tensor, Tensor):
        return f"tensor must be a torch.Tensor, got {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"tensor must be dense, got layout {tensor.layout}: call to_dense() on it first"
    if not tensor.is_floating_point():
        return f"unsupported tensor dtype {tensor.dtype}: expected a floating-point dtype"
    return None


def _setting_problem(density: float, values: str | ValueCodec, indices: str, step: int) -> str | None:
    if isinstance(density, bool) or not isinstance(density, Real) or not 0 < density <= 1:
        return f"density must be in (0, 1], got {density!r}"
    try:
        find_values(values)
    except (ValueError, PluginError) as error:
        return str(error)
    if indices not in ("coded", "raw"):
        return f"unknown index format {indices!r}: choose coded or raw"
    if not isinstance(step, int) or step < 0:
        return f"step must be an integer of at least 0, got {step!r}"
    return None


def _algorithm_problem(algorithm: str | Algorithm, state: object, tensor: Tensor) -> str | None:
    try:
        chosen = find_algorithm(algorithm)
    except (ValueError, PluginError) as error:
        return str(error)
    return None if state is None else chosen.state_problem(state, tensor.numel())


def _memory_problem(tensor: Tensor, residual: Tensor | None, out: Tensor | None) -> str | None:
    for name, given in (("out", out), ("residual", residual)):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            return f"{name} must be a torch.Tensor, got {type(given).__name__}"
        if given.layout is not torch.strided or given.device != tensor.device:
            return f"{name} must be dense and on the tensor's device"
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
        return "residual must not share memory with tensor or out"
    return None
