"""What tests of the front ends train with: tiny models, their data, and a loop for each front end.

No `from __future__ import annotations` here: DDP looks at the annotations of a hook.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.metrics.events import SPARSE
from oktopk.metrics.sinks import MemorySink

torch.set_num_threads(1)  # more of them may add in another order
DDP = DistributedDataParallel
FEATURES, CLASSES = 20, 5
Plan = str | Sequence[Sequence[str]] | None
Parameters = dict[str, Tensor]
Wrap = Callable[[nn.Module], nn.Module]


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """2,225 parameters; no two tensors have the same size, so that a size can stand for a name."""
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, CLASSES))
    return nn.Sequential(*layers).to(dtype)


def deep(layers: int) -> nn.Sequential:
    """As many layers of the same size: as many buckets if each holds one."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(layers)))


class Branches(nn.Module):
    """One of its two heads is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(FEATURES, 40), nn.Linear(40, CLASSES)
        self.other = nn.Sequential(nn.Linear(40, 7), nn.Linear(7, CLASSES, bias=False))

    def forward(self, x: Tensor, other: bool) -> Tensor:
        h = torch.relu(self.trunk(x))
        return self.head(h) + self.other(h) if other else self.head(h)


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def backward(net: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    dtype = next(net.parameters()).dtype
    F.cross_entropy(net(x.to(dtype)), y).backward()


def sgd(net: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)


def parameters_of(net: nn.Module) -> Parameters:
    return {name.removeprefix("module."): p.detach().clone() for name, p in net.named_parameters()}


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], reduce: Callable[[], Any] | None = None
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, dist.get_rank(), step)
        if reduce is not None:
            reduce()
        optimizer.step()


def hook_up(
    net: DDP, optimizer: torch.optim.Optimizer | None = None, named: bool = True, **options: Any
) -> oktopk.OkTopkState:
    """Both ways to register the hook: register() tells the state the names, register_comm_hook() does not."""
    settings: dict[str, Any] = {
        "density": 0.05,
        "warmup_steps": 0,
        "auto": False,
        "timeout": 30.0,
        "fusion_entries": 0,
    }
    state = oktopk.OkTopkState(**settings | options)
    if named:
        return state.register(net, optimizer)
    net.register_comm_hook(state, oktopk.oktopk_hook)
    if optimizer is not None:
        state.guard(optimizer)
    return state


@dataclass(frozen=True)
class Run:
    """What one rank has after training."""

    parameters: Parameters
    sparse_steps: int = 0
    layouts: list[list[list[str]]] = field(default_factory=list)
    """Of each step, the names in each bucket, if they are DDP's."""


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(_bits(one[name]), _bits(other[name])) for name in one
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def sparse_steps(sink: MemorySink) -> int:
    return sum(event.phase == SPARSE for event in sink.steps)


def error_of(action: Callable[[], Any]) -> str:
    """The text of the ValueError that it ends with."""
    try:
        action()
    except ValueError as error:
        return str(error)
    raise AssertionError("there was to be a ValueError")


# The same training through each front end.


def with_hook(plan: Plan, steps: int, fusion_entries: int = 0, **options: Any) -> Run:
    net = DDP(mlp(), bucket_cap_mb=0.003)
    optimizer, sink = sgd(net), MemorySink()
    names = {p: name for name, p in net.module.named_parameters()}
    layouts: list[list[list[str]]] = []

    def recorded(state: oktopk.OkTopkState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            layouts.append([])
        layouts[-1].append([names[p] for p in bucket.parameters()])
        return oktopk.oktopk_hook(state, bucket)

    named = net.module.named_parameters()
    with oktopk.OkTopkState(
        buckets=plan, named_parameters=named, sinks=[sink], fusion_entries=fusion_entries, **options
    ) as state:
        net.register_comm_hook(state, recorded)
        train(net, optimizer, range(steps))
    return Run(parameters_of(net), sparse_steps(sink), layouts)


def with_wrapper(plan: Plan, steps: int, **options: Any) -> Run:
    net, sink = mlp(), MemorySink()
    with oktopk.DistributedOptimizer(
        sgd(net), model=net, buckets=plan, sinks=[sink], fusion_entries=0, **options
    ) as optimizer:
        train(net, optimizer, range(steps))
    return Run(parameters_of(net), sparse_steps(sink))


def with_loop(plan: Plan, steps: int, **options: Any) -> Run:
    net, sink = mlp(), MemorySink()
    with oktopk.AllReducer(
        net.named_parameters(), buckets=plan, sinks=[sink], fusion_entries=0, **options
    ) as reducer:
        train(
            net, sgd(net), range(steps), lambda: reducer.sync({name: p.grad for name, p in net.named_parameters()})
        )
    return Run(parameters_of(net), sparse_steps(sink))


# Conservation: what came out, and what has stayed, is what went in.


@dataclass(frozen=True)
class Mass:
    """By size of the parameter: of one rank's gradients, of what was applied, and of what stays behind."""

    given: dict[int, Tensor]
    magnitude: dict[int, Tensor]
    applied: dict[int, Tensor]
    residual: dict[int, Tensor]


def weigh(
    net: DDP,
    optimizer: torch.optim.Optimizer,
    state: oktopk.OkTopkState,
    steps: int,
    run: Callable[[nn.Module, int, int], None] = backward,
) -> Mass:
    """Train, and add up this rank's own gradients, which a twin of the model computes, and those applied."""
    trained = [p for p in net.parameters() if p.requires_grad]
    given, magnitude, applied = ({p.numel(): torch.zeros(p.numel()).double() for p in trained} for _ in range(3))
    twin = copy.deepcopy(net.module)
    for step in range(steps):
        optimizer.zero_grad()
        twin.load_state_dict(net.module.state_dict())
        twin.zero_grad()
        run(twin, dist.get_rank(), step)
        run(net, dist.get_rank(), step)
        for own, p in zip((p for p in twin.parameters() if p.requires_grad), trained, strict=True):
            if own.grad is not None:
                given[p.numel()] += own.grad.double().flatten()
                magnitude[p.numel()] += own.grad.double().abs().flatten()
            if p.grad is not None:
                applied[p.numel()] += p.grad.double().flatten()
        optimizer.step()
    residual = {part.numel(): part.double() for part in state.state_dict()["residuals"].values()}
    return Mass(given, magnitude, applied, residual)


def assert_conserved(ranks: Sequence[Mass]) -> None:
    """To fp32 rounding, entry by entry."""
    assert ranks[0].given.keys() == ranks[0].residual.keys()
    for size in ranks[0].given:
        given = sum(mass.given[size] for mass in ranks)
        accounted = sum(mass.residual[size] for mass in ranks) + len(ranks) * ranks[0].applied[size]
        magnitude = sum(mass.magnitude[size] for mass in ranks)
        tolerance = 2.0**-20 * (magnitude + float(magnitude.max()))
        excess = (accounted - given).abs() - tolerance
        assert not bool((excess > 0).any()), f"{float(excess.max()):.3g} of a parameter of {size} entries is lost"
