"""What a reader of the documents has before a block: a model, an optimizer, a batch, on this rank."""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from tests.support.report_runs import write_run

Names = dict[str, Any]
_FRONT_ENDS = (
    oktopk.OkTopkState, oktopk.DistributedOptimizer, oktopk.LocalOptimizer, oktopk.AllReducer, oktopk.FsdpState
)  # fmt: skip


def modules() -> Names:
    """What the first lines of a script import."""
    return {
        "copy": copy, "logging": logging, "math": math, "os": os, "sys": sys,
        "torch": torch, "nn": nn, "dist": dist, "oktopk": oktopk,
        "DistributedDataParallel": DistributedDataParallel,
    }  # fmt: skip


def reader(page: str, rank: int) -> Names:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp_model = DistributedDataParallel(copy.deepcopy(model))
    x, y = torch.randn(8, 32), torch.randint(0, 10, (8,))
    names = {
        "rank": rank, "model": model, "ddp_model": ddp_model, "x": x, "y": y, "loss_function": cross_entropy,
        "optimizer": torch.optim.SGD(ddp_model.parameters(), lr=0.1), "loss": cross_entropy(ddp_model(x), y),
        "grads": {name: torch.ones_like(p) for name, p in model.named_parameters()},
    }  # fmt: skip
    return names | _EXTRAS.get(page, dict)()


def leave(names: Iterable[Any]) -> None:
    """End worker threads and connections, in the same order on all ranks."""
    for thing in names:
        if isinstance(thing, _FRONT_ENDS):
            thing.close()


def _sharded() -> Names:
    """A model that FSDP2 shards, on a mesh of two replicas with one shard each."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    return {
        "mesh": mesh, "model": model, "dcp": dcp, "folder": "sharded",
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip


def _runs() -> Names:
    """Folders of a run and of a sweep, which rank 0 writes."""
    if dist.get_rank() == 0 and not Path("runs").exists():
        for folder in ("runs/NAME", "FOLDER/a", "FOLDER/b"):
            write_run(Path(folder), steps=30, warmup=10)
    dist.barrier()
    return {}


_EXTRAS: dict[str, Callable[[], Names]] = {"docs/hsdp.md": _sharded, "docs/report.md": _runs}
