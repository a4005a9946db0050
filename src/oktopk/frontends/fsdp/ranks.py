"""The ranks of a device mesh: who exchanges with whom, and who decides together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...comm import Communicator, GroupCommunicator
from ...comm.process_group.limits import group_timeout

_NAMES = ("replicate", "dp_replicate")
"""What the dimension between replicas is usually called."""


def local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that this rank has, in the same memory."""
    found: Any = tensor.detach()
    part: Tensor = found.to_local() if hasattr(found, "to_local") else found  # importing DTensor takes its time
    return part


@dataclass(frozen=True)
class MeshRanks:
    """The ranks of a mesh, as one of them sees it.

                        shard                 replicas of rank 1:  1 and 3, which exchange
        replicate       0   1                 replica of rank 1:   0 and 1, which hold the shards of one model
                        2   3                 all four decide together

    Attributes:
        mesh: the whole mesh.
        dim: the dimension between replicas.
        replica: the global ranks that hold the shards of this rank's replica.
    """

    mesh: DeviceMesh
    dim: int
    replica: tuple[int, ...]

    @classmethod
    def of(cls, mesh: object, replicate: str | None = None) -> MeshRanks:
        """Find the replicas; a TypeError or ValueError that says how to make a mesh if there are none."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                "FsdpState needs the device mesh: init_device_mesh(device, (replicas, shards), "
                f'mesh_dim_names=("replicate", "shard")), got {type(mesh).__name__}'
            )
        names = mesh.mesh_dim_names or ()
        if replicate is None:
            replicate = next((name for name in _NAMES if name in names), None)
        if replicate not in names or len(names) < 2:
            raise ValueError(
                f"the mesh has the dimensions {names}: it needs one between replicas and one inside, as in "
                'mesh_dim_names=("replicate", "shard"); replicate= names the first'
            )
        dim = names.index(replicate)
        ranks = mesh.mesh.movedim(dim, 0).flatten(1)
        return cls(mesh, dim, tuple(ranks[mesh.get_local_rank(dim)].tolist()))

    @property
    def name(self) -> str:
        """The name of the dimension between replicas."""
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names[self.dim]

    @property
    def replicas(self) -> int:
        return int(self.mesh.size(self.dim))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.mesh.shape)

    def connect(self, timeout: float | None) -> tuple[Communicator, Communicator | None]:
        """Connections to the other replicas of this rank's shard, and to the whole mesh if that is more."""
        replicas = GroupCommunicator.exclusive(self.mesh.get_group(self.dim), timeout)
        if len(self.replica) == 1:
            return replicas, None
        return replicas, GroupCommunicator.exclusive(self._whole(), timeout)

    def _whole(self) -> dist.ProcessGroup | None:
        """A process group of all ranks of the mesh; None for the default one."""
        ranks = sorted(self.mesh.mesh.flatten().tolist())
        if len(ranks) == dist.get_world_size():
            return None
        seconds = group_timeout(self.mesh.get_group(self.dim))
        group: dist.ProcessGroup = dist.new_group(
            ranks, timedelta(seconds=seconds), use_local_synchronization=True
        )
        return group
