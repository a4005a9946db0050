"""Attach a contender to a model: a DDP model with its hook, and what it reports about each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from oktopk.algorithms.volume import WORD_BYTES, ring_words
from oktopk.frontends.ddp import OkTopkState
from oktopk.metrics.events import DENSE, SPARSE
from oktopk.tools.hooks import BF16, FP16, HOOKS, ONE_BUCKET, POWERSGD, register_power_sgd

from .contenders import ACCUMULATE, OURS, Contender

RAMP, LOW_RANK = "ramp", "low-rank"
"""Phases besides dense and sparse: the density still falls; PowerSGD compresses."""
_REHEARSED = 3


class Attached:
    """A DDP model whose gradients a contender averages. Plain DDP is the base of all."""

    resumable = True
    """Whether a new process can continue exactly where state_dict() was taken."""

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        self.contender = contender
        self.model = DistributedDataParallel(
            network,
            bucket_cap_mb=ONE_BUCKET if contender.kind == POWERSGD else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are averaged before a validation
        )
        self.parameters = sum(p.numel() for p in network.parameters() if p.requires_grad)

    def phase(self, step: int) -> str:
        """The phase of the step that was done last, number `step` from 0."""
        return DENSE

    def sent_bytes(self, step: int) -> float:
        """Bytes that this rank sent in that step: metered, or those of a ring."""
        return self._ring(self.parameters)

    def _ring(self, entries: float, width: int = WORD_BYTES) -> float:
        return width * ring_words(entries, dist.get_world_size())

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped on all ranks."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to resume, besides model and optimizer."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class _Hooked(Attached):
    """DDP with one of torch's hooks, which have no state."""

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        if contender.kind != ACCUMULATE:
            HOOKS[contender.kind](self.model)

    def sent_bytes(self, step: int) -> float:
        return self._ring(self.parameters, 2 if self.contender.kind in (FP16, BF16) else WORD_BYTES)


class _PowerSgd(Attached):
    resumable = False  # its errors belong to buckets, which a new DDP model orders differently at first

    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        self._state = register_power_sgd(self.model, contender.rank, contender.warmup_steps, 1)
        self._compressed = 0

    def phase(self, step: int) -> str:
        return DENSE if step < self.contender.warmup_steps else LOW_RANK

    def sent_bytes(self, step: int) -> float:
        before, self._compressed = self._compressed, self._state.total_numel_after_compression
        return self._ring(self.parameters if self.phase(step) == DENSE else self._compressed - before)


class _Ours(Attached):
    def __init__(self, contender: Contender, network: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(contender, network, optimizer)
        assert contender.algorithm is not None
        self._state = OkTopkState(
            algorithm=contender.algorithm, **{**contender.options, "warmup_steps": contender.warmup_steps}
        ).register(self.model, optimizer)
        assert contender.settings is not None
        self._ramp_steps = contender.settings.ramp_steps

    def phase(self, step: int) -> str:
        assert self._state.last is not None
        phase = self._state.last.phase
        ramp = self._ramp_steps and step < self.contender.warmup_steps + self._ramp_steps
        return RAMP if ramp and phase == SPARSE else phase

    def sent_bytes(self, step: int) -> float:
        assert self._state.last is not None
        return self._state.last.wire.sent_bytes

    @property
    def skipped(self) -> bool:
        return self._state.skipped

    def state_dict(self) -> dict[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load_state_dict(state)

    def close(self) -> None:
        self._state.close()


ATTACH: dict[str, Callable[[Contender, nn.Module, Optimizer], Attached]] = {
    **dict.fromkeys((*HOOKS, ACCUMULATE), _Hooked),
    POWERSGD: _PowerSgd,
    OURS: _Ours,
}


def attach(contender: Contender, network: nn.Module, optimizer: Optimizer) -> Attached:
    """Wrap the network in DDP, and let the contender average its gradients; collective."""
    return ATTACH[contender.kind](contender, network, optimizer)


def compiles(contender: Contender) -> bool:
    """Whether the contender has kernels that Numba compiles on first use."""
    return contender.kind == OURS


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
    optimizer = SGD(stand_in.parameters(), lr=0.0)
    options = {**contender.options, "ramp_steps": 0, "auto": False}
    attached = attach(replace(contender, warmup_steps=1, options=options), stand_in, optimizer)
    random = torch.Generator().manual_seed(dist.get_rank())
    try:
        for _ in range(_REHEARSED):
            optimizer.zero_grad()
            attached.model(random).backward()
            optimizer.step()
    finally:
        attached.close()
