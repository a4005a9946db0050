"""--shard: FSDP2 shards the model over the ranks of a replica, and replicas average sparsely.

FSDP is imported when it is needed only, which takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from oktopk.comm import Communicator
from oktopk.frontends.fsdp.ranks import local
from oktopk.metrics.events import MetricsSink, StepEvent
from oktopk.metrics.sinks import TrainerLists

T = TypeVar("T")
_MEMORIES = ("residuals", "velocities")


def make_mesh(device: str, shard: int, world: int) -> DeviceMesh:
    """Replicas of `shard` ranks each; neighbours are of one replica, as launchers number the ranks of a host."""
    return init_device_mesh(device, (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model: what its module lists have, its layers, are units, and all that is left is one."""
    from torch.distributed.fsdp import fully_shard

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for unit in (unit for units in reversed(lists) for unit in units):  # inner ones first
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A block in which every rank has the whole model, if it is sharded: it may call it without the others."""
    units: list[Any] = [module for module in model.modules() if hasattr(module, "unshard")]
    inner = [unit for unit in units if unit is not model]  # FSDP keeps the outermost one between forward passes
    for unit in units:
        unit.unshard()
    for unit in inner:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in inner:
            unit.set_reshard_after_forward(True, recurse=False)
        for unit in units:
            unit.reshard()


class ShardedOptimizer:
    """An optimizer whose gradients FsdpState averages, as the training loop calls it.

    Args:
        inner: the optimizer.
        model: what shard_model() was called on.
        **settings: those of FsdpState, and the mesh.
    """

    def __init__(self, inner: Optimizer, model: nn.Module, **settings: Any) -> None:
        from oktopk.frontends.fsdp.state import FsdpState

        self.inner, self._state = inner, FsdpState(**settings).register(model, inner)
        self.param_groups = inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def accumulating(self) -> AbstractContextManager[None]:
        """A block whose backward passes are not the last ones of the step."""
        return self._state.no_sync()

    def synchronize(self) -> StepEvent:
        """The step that backward has finished: gradients are means by now."""
        assert self._state.last is not None
        return self._state.last

    def step(self) -> None:
        """Change the parameters, unless the step was skipped: the optimizer is guarded."""
        self.inner.step()

    @property
    def schedule(self) -> list[tuple[int, float | None]]:
        return self._state.schedule

    def run(self, job: Callable[[Communicator], T]) -> T:
        return self._state.run(job)

    def set_trainer(self, trainer: Any) -> None:
        self.add_sink(TrainerLists(trainer))

    def add_sink(self, sink: MetricsSink) -> None:
        self._state.add_sink(sink)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "oktopk": self._state.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict() of this mesh, whose residuals may be this rank's parts alone."""
        oktopk, own = dict(state_dict["oktopk"]), self._state.state_dict()
        for memory in _MEMORIES:  # momentum correction may have been switched on or off since
            saved = oktopk.pop(memory, None)
            if saved is not None and memory in own:
                oktopk[memory] = {name: distribute(saved[name], like) for name, like in own[memory].items()}
        self._state.load_state_dict(oktopk)
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != "oktopk"})
        self.param_groups = self.inner.param_groups

    def __enter__(self) -> ShardedOptimizer:
        self._state.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.__exit__(kind, error, trace)


# What a checkpoint has of tensors that are distributed: whole parameters, and each rank's part of all the rest.


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def gather(tensor: Any) -> Tensor:
    """All of a tensor; the ranks that it is distributed over call it together."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def to_parts(state: Any) -> Any:
    """A state with this rank's part of every tensor."""
    if isinstance(state, Mapping):
        return {key: to_parts(value) for key, value in state.items()}
    return local(state) if isinstance(state, Tensor) else state


def distribute(part: Tensor, like: Tensor) -> Tensor:
    """The tensor that is distributed like another one, of which this rank has `part`."""
    from oktopk.frontends.fsdp.units import distribute_like

    if part.shape != local(like).shape:
        raise ValueError(f"a part has shape {list(part.shape)}, expected {list(local(like).shape)}")
    return distribute_like(part, like)


def distribute_state(state: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state from to_parts(): moments are distributed like the parameters of its groups."""
    parameters = [parameter for group in groups for parameter in group["params"]]

    def restore(value: Any, parameter: Tensor) -> Any:
        whole = not isinstance(value, Tensor) or value.ndim == 0  # a count of steps
        return value if whole or not hasattr(parameter, "full_tensor") else distribute(value, parameter)

    moments = {
        index: {name: restore(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}


def cut(whole: Tensor, like: Any) -> Tensor:
    """A tensor of which every rank has all, distributed like another one."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
