"""The units of an FSDP2 model: which parameters they have, and why some models cannot be averaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .ranks import MeshRanks


def find_units(model: nn.Module) -> list[list[str]]:
    """The parameters of each unit by name, in the order in which backward computes them: the root comes last."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    units = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            inner = {
                parameter
                for child in module.modules()
                if child is not module and isinstance(child, FSDPModule)
                for parameter in child.parameters()
            }
            units.append([names[parameter] for parameter in module.parameters() if parameter not in inner])
    taken: set[str] = set()
    distinct = []
    for unit in units:  # a parameter that two units have in common belongs to the first
        distinct.append([name for name in unit if name not in taken])
        taken |= {*unit}
    return [unit for unit in reversed(distinct) if unit]


def distribute_like(part: Tensor, parameter: Tensor) -> DTensor:
    """A distributed tensor like the parameter, of which this rank has `part`."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def model_problem(model: Any, ranks: MeshRanks) -> str | None:
    """Why gradients of the model cannot be averaged between replicas, with the remedy; None if they can."""
    shard = f"fully_shard(…, mesh=mesh[{_others(ranks)}])"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel is not sharded: use oktopk.OkTopkState for it"
    if not isinstance(model, nn.Module):
        return f"expected the model that fully_shard was called on, got {type(model).__name__}"
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        return f"FullyShardedDataParallel (FSDP1) has no place for a sparse exchange: use FSDP2, {shard}"
    if any(_replicates(module) for module in modules):
        return f"replicate() averages all gradients by itself: use {shard}, or DDP with oktopk.OkTopkState"
    if not any(isinstance(module, FSDPModule) for module in modules):
        return f"the model is not sharded: call {shard} on its blocks and on the model first"
    problems = (_parameter_problem(name, p, ranks, shard) for name, p in model.named_parameters())
    return next(filter(None, problems), None)


def _others(ranks: MeshRanks) -> str:
    names = [name for name in ranks.mesh.mesh_dim_names or () if name != ranks.name]
    return ", ".join(map(repr, names))


def _replicates(module: nn.Module) -> bool:
    by_fsdp = any(base.__name__ == "ReplicateModule" for base in type(module).__mro__)
    return by_fsdp or "replicate" in (_get_registry(module) or ())


def _parameter_problem(name: str, parameter: nn.Parameter, ranks: MeshRanks, shard: str) -> str | None:
    if parameter.is_meta:
        return f"{name} has no data: call model.to_empty(device=…) and initialise it before register()"
    if not parameter.requires_grad:
        return None
    if not isinstance(parameter, DTensor):
        return (
            f"{name} is in no FSDP unit, so that ranks of a replica do not average it: call {shard} on the model"
        )
    if not set(parameter.device_mesh.mesh.flatten().tolist()) <= set(ranks.replica):
        return (
            f"{name} is distributed over other replicas, too, which FSDP then averages densely: pass it one "
            f"replica's part of the mesh, {shard}"
        )
    if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(parameter, "_in_backward_optimizers"):
        return (
            f"a hook on {name} sees its gradient before it is averaged (an optimizer in backward, or another "
            "FsdpState): step the optimizer after backward, and close() another state first"
        )
    return None


# What FSDP2 does not tell publicly.


def _states(model: nn.Module) -> Iterable[Any]:
    return (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))


def find_sums(model: nn.Module) -> set[Tensor]:
    """The parameters whose gradients are sums over ranks, divided by a number of the user's.

    Units have that number, set_gradient_divide_factor(): those of experts may, and others not.
    """
    groups = (group for state in _states(model) for group in getattr(state, "_fsdp_param_groups", ()))
    return {
        parameter.sharded_param
        for group in groups
        if getattr(group, "gradient_divide_factor", None) is not None
        for parameter in group.fsdp_params
    }


def backward_under_way(model: nn.Module) -> bool:
    """Whether FSDP has gradients to come: it resets this in a callback at the end of backward."""
    contexts = (getattr(state, "_state_ctx", None) for state in _states(model))
    return any(getattr(context, "post_backward_final_callback_queued", False) for context in contexts)
