"""Attach a contender to a model and its optimizer, and say what it reports about each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from oktopk.algorithms.volume import WORD_BYTES, ring_words
from oktopk.frontends.base import FrontEnd
from oktopk.frontends.ddp import OkTopkState
from oktopk.frontends.local import LocalOptimizer
from oktopk.metrics.events import DENSE, SPARSE
from oktopk.tools.hooks import BF16, FP16, HOOKS, ONE_BUCKET, POWERSGD, register_power_sgd

from .contenders import ACCUMULATE, HSDP, LOCAL, NATIVE, OF_LOCAL, OURS, Contender

RAMP, LOW_RANK = "ramp", "low-rank"
"""Phases besides dense and sparse: the density still falls; PowerSGD compresses."""
_REHEARSED = 3


class Attached:
    """A model and its optimizer, as a contender trains them. Plain DDP is the base of all."""

    resumable = True
    """Whether a new process can continue exactly where state_dict() was taken."""
    mesh: DeviceMesh | None = None
    """Of a sharded model."""

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        self.contender, self.network, self.optimizer = contender, network, optimizer
        self.model = self._wrap()
        self.parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)

    def _wrap(self) -> nn.Module:
        return DistributedDataParallel(
            self.network,
            bucket_cap_mb=ONE_BUCKET if self.contender.kind == POWERSGD else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are averaged before a validation
        )

    @property
    def ddp(self) -> DistributedDataParallel:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    def accumulating(self) -> AbstractContextManager[None]:
        """A block whose backward passes are not the last ones of the step."""
        return self.ddp.no_sync()

    def step(self, clip: float | None) -> None:
        """Clip to this norm, and step."""
        if clip is not None and not self.skipped:
            clip_grad_norm_(self.network.parameters(), clip)
        self.optimizer.step()

    def phase(self, step: int) -> str:
        """The phase of the step that was done last, number `step` from 0."""
        return DENSE

    def sent_bytes(self, step: int) -> float:
        """Bytes that this rank sent in that step: metered, or those of a ring."""
        return self._ring(self.parameters)

    def _ring(self, entries: float, width: int = WORD_BYTES) -> float:
        return width * ring_words(entries, dist.get_world_size())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped on all ranks."""
        return False

    def synchronize(self) -> None:
        """Give all ranks the same parameters, to validate or save."""

    def localize(self) -> None:
        """Go on as if nothing had been validated or saved."""

    def whole_model(self) -> nn.Module:
        """The model to validate, with all of its parameters on every rank; collective."""
        return self.network

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and under "oktopk" what this rank needs besides to resume."""
        return {**self.optimizer.state_dict(), "oktopk": {}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "oktopk"})

    def close(self) -> None:
        pass


class _Hooked(Attached):
    """DDP with one of torch's hooks, which have no state."""

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        if contender.kind != ACCUMULATE:
            HOOKS[contender.kind](self.ddp)

    def sent_bytes(self, step: int) -> float:
        return self._ring(self.parameters, 2 if self.contender.kind in (FP16, BF16) else WORD_BYTES)


class _PowerSgd(Attached):
    resumable = False  # its errors belong to buckets, which a new DDP model orders differently at first

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        self._state = register_power_sgd(self.ddp, contender.rank, contender.warmup_steps, 1)
        self._compressed = 0

    def phase(self, step: int) -> str:
        return DENSE if step < self.contender.warmup_steps else LOW_RANK

    def sent_bytes(self, step: int) -> float:
        before, self._compressed = self._compressed, self._state.total_numel_after_compression
        return self._ring(self.parameters if self.phase(step) == DENSE else self._compressed - before)


class FrontEndAttached(Attached):
    """One of ours: what it reports is in its events."""

    front: FrontEnd

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        assert contender.settings is not None
        self._ramp_steps = contender.settings.ramp_steps or 0
        self._options: dict[str, Any] = {
            **contender.options, "algorithm": contender.algorithm, "warmup_steps": contender.warmup_steps
        }  # fmt: skip

    def phase(self, step: int) -> str:
        assert self.front.last is not None
        phase = self.front.last.phase
        ramp = self._ramp_steps and step < self.contender.warmup_steps + self._ramp_steps
        return RAMP if ramp and phase == SPARSE else phase

    def sent_bytes(self, step: int) -> float:
        assert self.front.last is not None
        return self.front.last.wire.sent_bytes

    @property
    def skipped(self) -> bool:
        return self.front.skipped

    def close(self) -> None:
        self.front.close()


class _Ours(FrontEndAttached):
    """DDP with our hook."""

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        self.front = OkTopkState(**self._options).register(self.ddp, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "oktopk": self.front.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.front.load_state_dict(state_dict["oktopk"])
        super().load_state_dict(state_dict)


class LocalAttached(FrontEndAttached):
    """The model without DDP, and an optimizer of every rank whose updates are averaged."""

    front: LocalOptimizer

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        self.front = self.optimizer = LocalOptimizer(optimizer, model=network, mesh=self.mesh, **self._options)

    def _wrap(self) -> nn.Module:
        return self.network

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, clip: float | None) -> None:
        """Clip this rank's own gradient, and step."""
        if clip is not None:
            clip_grad_norm_(self.network.parameters(), clip)
        self.optimizer.step()

    def synchronize(self) -> None:
        self.front.synchronize()

    def localize(self) -> None:
        self.front.localize()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state_dict))


ATTACH: dict[str, Callable[[Contender, nn.Module, Optimizer], Attached]] = {
    **dict.fromkeys((*HOOKS, ACCUMULATE), _Hooked),
    POWERSGD: _PowerSgd,
    OURS: _Ours,
    LOCAL: lambda contender, *model: (
        LocalAttached(contender, *model) if contender.shards == 1 else _sharded("LocalHsdp", contender, *model)
    ),
    HSDP: lambda *model: _sharded("SparseHsdp", *model),
    NATIVE: lambda *model: _sharded("NativeHsdp", *model),
}


def _sharded(kind: str, contender: Contender, network: nn.Module, optimizer: Optimizer) -> Attached:
    from . import hsdp  # imports FSDP, which takes its time

    attached: Attached = getattr(hsdp, kind)(contender, network, optimizer)
    return attached


def attach(contender: Contender, network: nn.Module, optimizer: Optimizer) -> Attached:
    """Let the contender average what this model learns from its gradients; collective."""
    return ATTACH[contender.kind](contender, network, optimizer)


def compiles(contender: Contender) -> bool:
    """Whether the contender has kernels that Numba compiles on first use."""
    return contender.kind in (OURS, LOCAL, HSDP)


def rehearse(contender: Contender, network: nn.Module) -> None:
    """Let all kernels compile before the clock starts: a few steps of a copy with random gradients.

    Parameters, their names and settings are those of the race, because they decide which kernels and index codes
    are used.
    """
    stand_in = copy.deepcopy(network)
    trained = [p for p in stand_in.parameters() if p.requires_grad]

    def forward(random: torch.Generator) -> torch.Tensor:
        return torch.stack([(p * torch.randn(p.shape, generator=random)).sum() for p in trained]).sum()

    stand_in.forward = forward
    options = {name: value for name, value in contender.options.items() if name not in OF_LOCAL}
    options |= {"ramp_steps": 0, "auto": False}
    stepping = SGD(stand_in.parameters(), lr=0.01)
    kind = OURS if contender.kind == HSDP else contender.kind  # FSDP would replace what forward() uses
    plain = replace(contender, kind=kind, shards=1, warmup_steps=1, options=options)
    attached = attach(plain, stand_in, stepping)
    random = torch.Generator().manual_seed(dist.get_rank())
    try:
        for _ in range(_REHEARSED):
            attached.optimizer.zero_grad()
            attached.model(random).backward()
            attached.step(None)
    finally:
        attached.close()
