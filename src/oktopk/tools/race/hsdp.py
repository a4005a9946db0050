"""Contenders that shard the model: FSDP2 inside each replica, and torch's or our average between replicas."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oktopk.algorithms.volume import WORD_BYTES, ring_words
from oktopk.frontends.fsdp.state import FsdpState
from oktopk.train.sharded import make_mesh, shard_model

from .attach import Attached, FrontEndAttached, LocalAttached
from .contenders import Contender
from .spec import RaceError


class _Sharded(Attached):
    """A model on a mesh of replicas and shards; the members of its module lists are units, and so is the rest."""

    resumable = False  # checkpoints of a race are those of whole models

    def _wrap(self) -> nn.Module:
        shards, world = self.contender.shards, dist.get_world_size()
        if world % shards:
            raise RaceError(f"{self.contender.name}: {world} ranks are no multiple of {shards} shards")
        self._whole = copy.deepcopy(self.network)
        self.mesh = whole = make_mesh("cpu", shards, world)
        mesh = whole if self.contender.algorithm is None else whole["shard"]
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        shard_model(self.network, mesh)
        sharded = dict(self.network.named_parameters())
        for group in self.optimizer.param_groups:  # made for the parameters before they were sharded
            group["params"] = [sharded[names[parameter]] for parameter in group["params"]]
        return self.network

    @torch.no_grad()
    def whole_model(self) -> nn.Module:
        for whole, mine in zip(self._whole.parameters(), self.network.parameters(), strict=True):
            whole.copy_(mine.full_tensor() if isinstance(mine, DTensor) else mine)
        for mean, own in zip(self._whole.buffers(), self.network.buffers(), strict=True):
            mean.copy_(own)
        return self._whole

    def sent_bytes(self, step: int) -> float:
        """Between replicas: a ring of this rank's shards."""
        shards = self.contender.shards
        return WORD_BYTES * ring_words(self.parameters / shards, dist.get_world_size() // shards)


class NativeHsdp(_Sharded):
    """torch's HSDP: fully_shard has the whole mesh."""

    def accumulating(self) -> AbstractContextManager[None]:
        return _NoGradientSync(self.network)


class SparseHsdp(FrontEndAttached, _Sharded):
    """FsdpState between replicas."""

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        assert self.mesh is not None
        self.front = FsdpState(self.mesh, **self._options).register(network, optimizer)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.front.no_sync() if isinstance(self.front, FsdpState) else nullcontext()


class LocalHsdp(LocalAttached, _Sharded):
    """LocalOptimizer between replicas."""

    def _wrap(self) -> nn.Module:
        return _Sharded._wrap(self)


class _NoGradientSync:
    """A block whose backward passes reduce nothing."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._model.set_requires_gradient_sync(True)
