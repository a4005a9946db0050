"""A small model in a wrapped optimizer, on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import oktopk
from tests.support.stepping import bits, through_a_file

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_model(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(77 + 100 * step + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x), y)


def momentum_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def wrap(
    model: nn.Module, comm: oktopk.Communicator | None, make: MakeOptimizer = momentum_sgd, **options: Any
) -> oktopk.DistributedOptimizer:
    """Two buckets, some dense steps, then sparse ones."""
    return oktopk.DistributedOptimizer(
        make(model.parameters()), model=model, comm=comm, **(_defaults(model) | options)
    )


def wrap_local(
    model: nn.Module, comm: oktopk.Communicator | None, make: MakeOptimizer = adamw, **options: Any
) -> oktopk.LocalOptimizer:
    """The same, but updates are averaged."""
    return oktopk.LocalOptimizer(make(model.parameters()), model=model, comm=comm, **(_defaults(model) | options))


def _defaults(model: nn.Module) -> dict[str, Any]:
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    buckets = [names[len(names) // 2 :], names[: len(names) // 2]]
    return {
        "density": 0.1, "warmup_steps": 2, "auto": False, "fusion_entries": 0,
        "buckets": buckets, "values": "fp32",
    }  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def common(model: nn.Module, optimizer: oktopk.LocalOptimizer) -> dict[str, Tensor]:
    """What all ranks have in common; training goes on as if nobody had looked."""
    optimizer.synchronize()
    found = values(model)
    optimizer.localize()
    return found


def saved(optimizer: oktopk.LocalOptimizer) -> dict[str, Any]:
    """The state, which is saved between synchronize() and localize()."""
    optimizer.synchronize()
    state = through_a_file(optimizer.state_dict())
    optimizer.localize()
    return state


def assert_replicas(models: Iterable[dict[str, Tensor]]) -> None:
    first, *others = models
    for other in others:
        for name in first:
            assert torch.equal(_bits(first[name]), _bits(other[name])), name


def _bits(x: Tensor) -> Tensor:
    return bits(x) if x.dtype == torch.float32 else x
