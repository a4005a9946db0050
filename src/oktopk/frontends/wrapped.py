"""An optimizer around another one: what DistributedOptimizer and LocalOptimizer share, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.broadcast import broadcast_tensors
from ..engine.state_dict import redistribute_residuals
from ..feedback.buckets import BucketPlan
from .base import TrainerFrontEnd, check_momentum, check_supported, describe
from .bucketed import BucketedGradients, name_parameters

OKTOPK = "oktopk"
"""Where the state_dict() of a wrapped optimizer has the engine's state; the rest is the inner optimizer's."""


class WrappedOptimizer(TrainerFrontEnd, Optimizer):
    """Has the groups and the state of the inner optimizer, and its parameters by name and in buckets."""

    inner: Optimizer

    def _wrap(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None,
        model: nn.Module | None, buckets: BucketPlan, dtype: torch.dtype | None = None,
    ) -> dict[str, object]:  # fmt: skip
        """Check and take over an optimizer; returns what ranks must agree on.

        Args:
            optimizer: the optimizer to wrap.
            named_parameters: pairs of name and parameter; by default those of `model`.
            model: the model, if it is known.
            buckets: how to form buckets.
            dtype: of the buckets; by default that of their parameters.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.inner = optimizer
        Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self._link()
        if named_parameters is None and model is not None:
            named_parameters = model.named_parameters()
        self._named = name_parameters(optimizer, named_parameters)
        self._known = {id(parameter) for parameter in self._named.values()}
        check_supported(self._named.items(), model)
        self._parts = {name: self._part(parameter) for name, parameter in self._named.items()}
        self._gradients = BucketedGradients(self._parts, buckets, dtype)
        return describe(self._named) | {"buckets": self._gradients.buckets}

    __repr__ = Optimizer.__repr__  # the groups, as of any optimizer

    def _part(self, tensor: Tensor) -> Tensor:
        """What this rank has of a parameter, a gradient or a buffer: all of it, unless the model is sharded."""
        return tensor

    def _link(self) -> None:
        """Groups and state are those of the inner optimizer, not copies."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _check_between_steps(self, what: str) -> None:
        """Raise if something is under way; `what` would have to wait."""

    def _buckets_changed(self) -> None:
        """There are other buckets from here on."""

    def _check_known(self) -> None:
        if not self._known.issuperset(id(p) for group in self.param_groups for p in group["params"]):
            raise ValueError("the optimizer has parameters that are not averaged: add them by add_param_group()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters that join later are reduced in buckets of their own. What one rank refuses, none adds."""
        if not hasattr(self, "_engine"):  # while Optimizer.__init__ runs
            super().add_param_group(param_group)
            return
        self._check_between_steps("add parameters")
        groups = self.inner.param_groups
        number = len(groups)
        with self._engine.uninterrupted():
            try:
                with self._engine.checking_together() as terms:
                    self.inner.add_param_group(param_group)  # which checks, too
                    check_momentum(self._engine.settings, self.inner)
                    new = {f"group{number}.{j}": p for j, p in enumerate(groups[-1]["params"])}
                    for name in new.keys() & self._named.keys():
                        raise ValueError(f"the optimizer has a parameter {name} already: rename that one")
                    check_supported(new.items())
                    needed = [name for name, p in new.items() if p.requires_grad]
                    terms |= describe(new) | {"parameters that require a gradient": needed}
            except Exception:
                del groups[number:]
                raise
            parts = {name: self._part(parameter) for name, parameter in new.items()}
            self._gradients.extend(parts)
            self._named |= new
            self._parts |= parts
            self._known |= {id(parameter) for parameter in new.values()}
            self._buckets_changed()
            self._engine.run(lambda comm: broadcast_tensors(comm, parts), replicas=True)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "oktopk" what this rank keeps back: every rank saves its own."""
        return {**self.inner.state_dict(), OKTOPK: self._engine.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); one of a plain optimizer will do, then residuals start at zero."""
        own = {key: value for key, value in state_dict.items() if key != OKTOPK}
        apply = None
        if OKTOPK in state_dict:  # checked before the inner optimizer changes, which checks its own
            apply = self._gradients.read_state_dict(self._engine, state_dict[OKTOPK])
        self.inner.load_state_dict(own)
        self._link()
        if apply is None:
            self._engine.drop_residuals()
        else:
            apply()
            self._buckets_changed()

    def broadcast(self, model: nn.Module | None = None) -> None:
        """Give all ranks the parameters of rank 0, and the buffers of a model."""
        tensors: dict[str, Tensor] = dict(self._named)
        if model is not None:
            tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
        parts = {name: self._part(tensor) for name, tensor in tensors.items()}
        self._engine.run(lambda comm: broadcast_tensors(comm, parts), replicas=True)

    @property
    def schedule(self) -> list[tuple[int, float | None]]:
        """The density of every step so far, as pairs (step, density) from that step on; None is dense.

        Passed as `density=` of another run, it repeats this one to the bit, whatever the steps take there.
        """
        return self._engine.schedule

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._engine.rank


# Another number of ranks.


def redistribute(states: Iterable[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """The state of one of `world` ranks, made from those of all ranks of an earlier run, in any order.

    Each rank gets the mean of the old residuals, so that the sum over ranks, divided by their number, is what
    it was: Σe'/P' = Σe/P; with ranks_per_host, over the leaders and by their number. Of wrapped optimizers each
    rank also gets the mean of the old moments, which differ between ranks for a LocalOptimizer.

    Args:
        states: The state_dict() of every rank of the earlier run. They are read one at a time: pass a generator
            that loads file after file.
        rank: The rank that the new state is for.
        world: The new number of ranks.

    Returns:
        A state for load_state_dict() on that rank. Thresholds are not kept: the first sparse step evaluates them.

    Example:
        >>> import torch, oktopk
        >>> def train(comm):
        ...     weights = [("w", torch.zeros(8, requires_grad=True))]
        ...     with oktopk.AllReducer(weights, comm=comm, warmup_steps=0) as reducer:
        ...         reducer.sync({"w": torch.arange(8.0)})
        ...         return reducer.state_dict()
        >>> state = oktopk.redistribute(oktopk.run_threads(2, train), rank=0, world=1)
        >>> state["world"], state["residuals"]["w"].tolist()
        (1, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0])
    """
    optimizers, plain = _MeanState(), 0

    def engines() -> Iterator[Mapping[str, Any]]:
        nonlocal plain
        for state in states:
            wrapped = isinstance(state, Mapping) and OKTOPK in state
            yield state[OKTOPK] if wrapped else state  # which is checked before it is used further
            if wrapped:
                optimizers.add(state, state[OKTOPK]["rank"])
            else:
                plain += 1

    shared = redistribute_residuals(engines(), rank, world)
    if optimizers.ranks and plain:
        raise ValueError(f"the states are not of one run: {plain} of them have no state of an optimizer")
    return {**optimizers.mean(), OKTOPK: shared} if optimizers.ranks else shared


class _MeanState:
    """The mean of the state_dicts of torch optimizers.

    Floating-point tensors are averaged over the ranks that have them. Everything else is that of the lowest rank.
    """

    def __init__(self) -> None:
        self.ranks = 0
        self._sums: dict[tuple[Any, str], tuple[Tensor, int]] = {}
        self._kept: dict[tuple[Any, str], tuple[int, Any]] = {}
        self._rest: tuple[int, dict[str, Any]] = (0, {})

    def add(self, state_dict: Mapping[str, Any], rank: int) -> None:
        rest = {key: value for key, value in state_dict.items() if key not in (OKTOPK, "state")}
        if not isinstance(state_dict.get("state"), Mapping):
            raise ValueError(f"this is not the state_dict of an optimizer: rank {rank} has no 'state'")
        if not self.ranks or rank < self._rest[0]:
            self._rest = rank, rest
        self.ranks += 1
        for index, entries in state_dict["state"].items():
            for key, value in entries.items():
                place = index, key
                if place not in self._kept or rank < self._kept[place][0]:
                    self._kept[place] = rank, value
                if isinstance(value, Tensor) and value.is_floating_point():
                    total, count = self._sums.get(place, (torch.zeros(value.shape, dtype=torch.float64), 0))
                    if total.shape != value.shape:
                        raise ValueError(f"the states are not of one run: other shapes of {key} ({index})")
                    self._sums[place] = total.add_(value.cpu()), count + 1

    def mean(self) -> dict[str, Any]:
        state: dict[Any, dict[str, Any]] = {}
        for (index, key), (_, value) in self._kept.items():
            if (index, key) in self._sums:
                total, count = self._sums[index, key]
                value = (total / count).to(value.dtype)
            state.setdefault(index, {})[key] = value
        return {"state": state, **self._rest[1]}
