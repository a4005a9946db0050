"""The state of FsdpState in torch.distributed.checkpoint: residuals as distributed tensors, for any mesh.

The residual of a parameter is a tensor [replicas, *shape], of which each rank has its shard of its replica:

    saved on 2 x 2        read on 2 x 2            read on 1 x 4 (the mean over the first dimension)
        r0 s0 | r0 s1         r0 s0 | r0 s1            mean s0 | mean s1 | mean s2 | mean s3
        r1 s0 | r1 s1         r1 s0 | r1 s1

The same number of replicas reads its own residuals, whatever its shards; another one reads the mean, so that
Σe/R is what it was. Thresholds belong to a rank, and are kept if the mesh is the same.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ...feedback.buckets import MISMATCH
from .ranks import MeshRanks, local

FORMAT = 1
_MEMORIES = ("residuals", "velocities")
_OF_MESH: dict[str, list[Any]] = {"buckets": [], "groups": []}
"""What another mesh starts without."""


def save_mesh_state(
    state: Mapping[str, Any], parameters: Mapping[str, Tensor], ranks: MeshRanks, momentum: bool
) -> dict[str, Any]:
    """The engine's state_dict() for torch.distributed.checkpoint. All ranks must have the same entries."""
    rest = {name: value for name, value in state.items() if name not in _MEMORIES}
    rest["mesh"] = list(ranks.shape)
    saved: dict[str, Any] = {
        "format": FORMAT,
        "shared": _pack(rest | _OF_MESH),
        "ranks": {_own_key(ranks): _pack(rest)},
    }
    for memory in _MEMORIES if momentum else _MEMORIES[:1]:
        saved[memory] = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad or name in state[memory]:
                part = local(parameter)
                held = state[memory].get(name, torch.zeros(part.numel(), device=part.device))
                saved[memory][name] = _stack(held.view(1, *part.shape), parameter, ranks, ranks.replicas)
    return saved


def read_mesh_state(
    saved: Mapping[str, Any], parameters: Mapping[str, Tensor], ranks: MeshRanks
) -> dict[str, Any]:
    """The engine's state_dict() from what torch.distributed.checkpoint has read."""
    if not isinstance(saved, Mapping) or "format" not in saved:
        raise ValueError("this is not a state_dict of oktopk.FsdpState")
    if saved["format"] != FORMAT:
        raise ValueError(f"the state has format {saved['format']!r}, this version of oktopk reads {FORMAT}")
    shared = _unpack(saved.get("shared"), "the state that all ranks share")
    own = saved.get("ranks", {}).get(_own_key(ranks)) if shared.get("mesh") == list(ranks.shape) else None
    rest = shared if own is None else _unpack(own, "the state of this rank")
    memories = {memory: _read_memory(saved, memory, parameters, ranks) for memory in _MEMORIES}
    return {**rest, **memories, "rank": ranks.mesh.get_local_rank(ranks.dim), "world": ranks.replicas}


def _read_memory(
    saved: Mapping[str, Any], memory: str, parameters: Mapping[str, Tensor], ranks: MeshRanks
) -> dict[str, Tensor]:
    found = {}
    for name, stacked in saved.get(memory, {}).items():
        if name not in parameters:
            raise ValueError(f"{MISMATCH}: only in the checkpoint: {name}")
        if not isinstance(stacked, DTensor) or stacked.shape[1:] != parameters[name].shape:
            raise ValueError(f"{MISMATCH}: the {memory} of {name} do not have the shape of the parameter")
        part = local(stacked)
        found[name] = (part[0] if stacked.shape[0] == ranks.replicas else part.mean(0)).flatten()
    return found


def prepare_loading(
    checkpoint: str | os.PathLike[str] | StorageReader, key: str, parameters: Mapping[str, Tensor],
    ranks: MeshRanks,
) -> Callable[[], dict[str, Any]]:  # fmt: skip
    """Find what save_mesh_state() made, on this mesh or on another one.

    Returns a function that reads it; all ranks call it together.
    """
    reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever a damaged or missing file leads to
        raise ValueError(f"cannot read the checkpoint {checkpoint}: {error!r}") from error
    if f"{key}.format" not in entries:
        raise ValueError(f"the checkpoint {checkpoint} has no state of oktopk.FsdpState under {key!r}")
    wanted: dict[str, Any] = {"format": 0, "shared": b""}
    if f"{key}.ranks.{_own_key(ranks)}" in entries:
        wanted["ranks"] = {_own_key(ranks): b""}
    for memory in _MEMORIES:
        sizes = {
            entry.removeprefix(f"{key}.{memory}."): tuple(facts.size)
            for entry, facts in entries.items()
            if entry.startswith(f"{key}.{memory}.") and isinstance(facts, TensorStorageMetadata)
        }
        if sizes or memory == _MEMORIES[0]:
            wanted[memory] = {
                name: _empty(parameters[name], ranks, size[0])
                for name, size in _check_sizes(sizes, parameters, memory).items()
            }

    def read() -> dict[str, Any]:
        try:
            load({key: wanted}, storage_reader=reader)
        except CheckpointException as error:  # raised on all ranks, though no Exception
            reason = next((failure for failure, _ in error.failures.values()), error)
            raise ValueError(f"cannot read the checkpoint {checkpoint}: {reason!r}") from error
        return wanted

    return read


def _check_sizes(
    sizes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor], memory: str
) -> Mapping[str, tuple[int, ...]]:
    """Compare what the checkpoint has with the parameters of the model."""
    missing = [name for name, p in parameters.items() if p.requires_grad and name not in sizes]
    unknown = [name for name in sizes if name not in parameters]
    for where, names in (("the model", missing), ("the checkpoint", unknown)):
        if names:
            raise ValueError(f"{MISMATCH}: only in {where}: {', '.join(names[:5])}")
    for name, size in sizes.items():
        if size[1:] != tuple(parameters[name].shape) or size[0] < 1:
            raise ValueError(
                f"{MISMATCH}: the {memory} of {name} have the shape {size[1:]}, the parameter "
                f"{tuple(parameters[name].shape)}"
            )
    return sizes


# Distributed tensors of all replicas.


def _own_key(ranks: MeshRanks) -> str:
    return str(ranks.mesh.get_rank())


def _empty(parameter: Tensor, ranks: MeshRanks, replicas: int) -> DTensor:
    """Memory for this rank's part of what so many replicas have saved."""
    rows = 1 if replicas == ranks.replicas else replicas
    part = local(parameter)
    return _stack(torch.zeros((rows, *part.shape), device=part.device), parameter, ranks, replicas)


def _stack(part: Tensor, parameter: Tensor, ranks: MeshRanks, replicas: int) -> DTensor:
    """The tensor [replicas, *shape], of which this rank has `part`: its own replica, or its shards of all."""
    assert isinstance(parameter, DTensor)
    inner = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    names = [name for name in ranks.mesh.mesh_dim_names or () if name == ranks.name or name in inner]
    if len(names) != len(inner) + 1:
        raise ValueError(
            f"parameters are sharded over {tuple(inner)}, which are no dimensions of the mesh "
            f"{ranks.mesh.mesh_dim_names}: pass FsdpState the mesh whose parts fully_shard was given"
        )
    outer: Placement = Shard(0) if replicas == ranks.replicas else Replicate()
    placements = [outer if name == ranks.name else _move_down(inner[name]) for name in names]
    shape = torch.Size((replicas, *parameter.shape))
    return DTensor.from_local(
        part, ranks.mesh[tuple(names)], placements, run_check=False,
        shape=shape, stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def _move_down(placement: Placement) -> Placement:
    """The placement behind one more dimension."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


# What is no tensor.


def _pack(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _unpack(packed: object, what: str) -> dict[str, Any]:
    try:
        if not isinstance(packed, bytes):
            raise TypeError(f"expected bytes, got {type(packed).__name__}")
        found = torch.load(io.BytesIO(packed), weights_only=True)
        if not isinstance(found, dict):
            raise TypeError(f"expected a dict, got {type(found).__name__}")
        return found
    except Exception as error:  # whatever damaged bytes lead to
        raise ValueError(f"checkpoint is damaged: {what} cannot be read: {error!r}") from error
