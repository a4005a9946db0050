"""A small model, sharded by FSDP2 on a mesh of replicas and shards, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    """Nested units; 15 rows on two or four ranks are uneven, and three rows leave a fourth rank without any."""

    def __init__(self, width: int = 15, blocks: int = 2) -> None:
        super().__init__()
        self.emb = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, blocks: int | None = None) -> Tensor:
        x = self.emb(x)
        for block in self.blocks[:blocks]:
            x = block(x)
        return self.head(x)


def make_net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def shard(net: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 7, generator=generator)
    return x, x[:, :3].sin() + 0.1 * torch.randn(8, 3, generator=generator)


def backward(net: nn.Module, step: int = 0, **options: Any) -> float:
    x, y = batch(dist.get_rank(), step)
    loss = F.mse_loss(net(x, **options).float(), y)
    loss.backward()
    return float(loss.detach())


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def parts(net: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of the parameters."""
    return {name: local(p).clone() for name, p in net.named_parameters()}


def grads(net: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of the gradients that are there."""
    return {name: local(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((float((a[n] - b[n]).abs().max()) for n in a if a[n].numel()), default=0.0)


def sum_over(mesh: DeviceMesh, dim: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In double precision."""
    total = {name: tensor.double() for name, tensor in tensors.items()}
    for tensor in total.values():
        dist.all_reduce(tensor, group=mesh.get_group(dim))
    return total


def replicas_equal(mesh: DeviceMesh, net: nn.Module) -> bool:
    mine = torch.cat([part.flatten() for part in parts(net).values()])
    first = mine.clone()
    group = mesh.get_group("replicate")
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    return torch.equal(mine, first)


def poison(net: nn.Module, rank: int, row: int = 0) -> Callable[[], None]:
    """A NaN in one row of the first layer's gradient on one rank, before FSDP reduces it."""

    spoiling = [dist.get_rank() == rank]

    def spoil(grad: Tensor) -> Tensor:
        if not spoiling[0]:
            return grad
        grad = grad.clone()
        grad[row] = float("nan")
        return grad

    handle = net.emb.register_forward_pre_hook(lambda module, _: module.weight.register_hook(spoil) and None)

    def end() -> None:
        handle.remove()
        spoiling[0] = False  # FSDP uses the same unsharded tensor, with its hooks, in every step

    return end
