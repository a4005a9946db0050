"""The hook with everything that DistributedDataParallel can do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import oktopk
from oktopk.engine.settings import Settings
from oktopk.metrics.sinks import MemorySink
from tests.support import worlds
from tests.support.training import (
    DDP,
    Branches,
    Mass,
    Parameters,
    assert_conserved,
    backward,
    batch,
    deep,
    error_of,
    hook_up,
    mlp,
    parameters_of,
    same_bits,
    sgd,
    train,
    weigh,
)

CAP = 0.001
"""MB; more than one bucket of every model here, once DDP has rebuilt them."""


@dataclass(frozen=True)
class Weighed:
    mass: Mass
    parameters: Parameters
    layouts: list[list[int]]
    """Of each step, the sizes of the buckets."""
    sparse: bool


def accumulate(net: nn.Module, rank: int, step: int) -> None:
    with net.no_sync() if isinstance(net, DDP) else contextlib.nullcontext():
        backward(net, rank, step)
        backward(net, rank, step + 500)
    backward(net, rank, step + 700)


def on_some_ranks(net: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    F.cross_entropy(net(x, other=(rank + step) % 2 == 0), y).backward()


def on_some_steps(net: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    F.cross_entropy(net(x, other=step % 3 == 0), y).backward()


def frozen() -> nn.Sequential:
    net = mlp()
    net[4].requires_grad_(False)
    return net


def half(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: mlp(dtype)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[..., None]]] = {
    "rebuilt buckets": (mlp, {}, backward),
    "gradient_as_bucket_view": (mlp, {"gradient_as_bucket_view": True}, backward),
    "static_graph": (mlp, {"static_graph": True}, backward),
    "no_sync": (mlp, {}, accumulate),
    "no_sync and gradient_as_bucket_view": (mlp, {"gradient_as_bucket_view": True}, accumulate),
    "a branch on some ranks": (Branches, {"find_unused_parameters": True}, on_some_ranks),
    "a branch on some steps": (Branches, {"find_unused_parameters": True}, on_some_steps),
    "frozen parameters": (frozen, {}, backward),
    "bfloat16": (half(torch.bfloat16), {}, backward),
    "float16": (half(torch.float16), {}, backward),
}


def weighed(case: str, named: bool, **settings: Any) -> Weighed:
    """Ten sparse steps; DDP rebuilds its buckets after the first."""
    make, ddp, run = CASES[case]
    net = DDP(make(), bucket_cap_mb=CAP, **ddp)
    optimizer, sink = sgd(net), MemorySink()
    with hook_up(net, optimizer, named, sinks=[sink], **settings) as state:
        mass = weigh(net, optimizer, state, 10, run)
    layouts = [[reduction.volume.size for reduction in step.reductions] for step in sink.steps]
    return Weighed(mass, parameters_of(net), layouts, all(step.phase == "sparse" for step in sink.steps))


WAYS: dict[str, dict[str, Any]] = {
    "with names": {"named": True},
    "without names": {"named": False},
    "sharing messages": {"named": True, "fusion_entries": Settings.fusion_entries},
}


def weigh_all(connect: Callable[..., Any], case: str) -> dict[str, Weighed]:
    return {way: weighed(case, **options) for way, options in WAYS.items()}


@pytest.mark.parametrize("case", CASES)
def test_replicas_agree_and_mass_is_conserved(case: str) -> None:
    """Entry by entry: residuals of all ranks + P * applied = gradients."""
    ranks = worlds.run("gloo", 2, weigh_all, case)
    start = parameters_of(CASES[case][0]())
    for way, options in WAYS.items():
        first = ranks[0][way]
        assert first.sparse
        assert len(first.layouts) == 10
        if "fusion_entries" in options:
            assert {len(layout) for layout in first.layouts} == {1}
        elif "branch" not in case:
            assert first.layouts[0] != first.layouts[-1], "DDP was to rebuild its buckets"
        assert not same_bits(first.parameters, start)
        for name, p in first.parameters.items():
            assert p.dtype == start[name].dtype
            assert bool(p.isfinite().all())
        assert all(same_bits(first.parameters, rank[way].parameters) for rank in ranks)
        assert_conserved([rank[way].mass for rank in ranks])


def uneven(connect: Callable[..., Any]) -> dict[bool, tuple[Mass, Parameters, int]]:
    outcomes = {}
    for named in (True, False):
        net = DDP(mlp(), bucket_cap_mb=CAP)
        optimizer = sgd(net)
        with hook_up(net, optimizer, named) as state, net.join():
            mass = weigh(net, optimizer, state, 3 + 4 * dist.get_rank())
        residual = {part.numel(): part.double() for part in state.state_dict()["residuals"].values()}
        mass.residual.update(residual)  # a rank that ran out of data keeps what it has
        outcomes[named] = mass, parameters_of(net), state.step
    return outcomes


def test_join_with_uneven_inputs() -> None:
    ranks = worlds.run("gloo", 3, uneven)
    for named in (True, False):
        masses, parameters, steps = zip(*(rank[named] for rank in ranks), strict=True)
        assert steps == (11, 11, 11)
        assert all(same_bits(parameters[0], other) for other in parameters)
        assert_conserved(masses[::-1])  # the last rank has seen all steps


def one_big_batch(connect: Callable[..., Any]) -> tuple[Parameters, Parameters, int]:
    """Two ranks with two passes of 8 each, and one model with the 32 of them."""
    net, alone = DDP(mlp(), bucket_cap_mb=CAP), mlp()
    optimizer, other = sgd(net), sgd(alone)
    with hook_up(net, optimizer, algorithm="dense") as state:
        for step in range(5):
            everything = [batch(rank, 2 * step + i) for rank in range(2) for i in range(2)]
            own = everything[2 * dist.get_rank() :][:2]
            optimizer.zero_grad()
            with net.no_sync():
                (F.cross_entropy(net(own[0][0]), own[0][1]) / 2).backward()
            (F.cross_entropy(net(own[1][0]), own[1][1]) / 2).backward()
            optimizer.step()
            other.zero_grad()
            x, y = (torch.cat(parts) for parts in zip(*everything, strict=True))
            F.cross_entropy(alone(x), y).backward()
            other.step()
        return parameters_of(net), parameters_of(alone), state.step


def test_no_sync_accumulation_is_one_big_batch() -> None:
    for parameters, expected, steps in worlds.run("gloo", 2, one_big_batch):
        assert steps == 5
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


def alternate(connect: Callable[..., Any]) -> tuple[list[Parameters], list[Parameters]]:
    def start() -> list[tuple[DDP, torch.optim.Optimizer, Any]]:
        nets = [DDP(mlp(), bucket_cap_mb=CAP), DDP(deep(2), bucket_cap_mb=CAP)]
        optimizers = [sgd(net) for net in nets]
        return [(n, o, hook_up(n, o, named)) for n, o, named in zip(nets, optimizers, (True, False), strict=True)]

    together, apart = start(), start()
    for step in range(10):
        for net, optimizer, _ in together:
            train(net, optimizer, [step])
    for net, optimizer, _ in apart:
        train(net, optimizer, range(10))
    for _, _, state in together + apart:
        state.close()
    return [parameters_of(net) for net, _, _ in together], [parameters_of(net) for net, _, _ in apart]


def test_two_models_in_turn_are_two_models_one_after_the_other() -> None:
    for together, apart in worlds.run("gloo", 2, alternate):
        assert all(same_bits(one, other) for one, other in zip(together, apart, strict=True))


def compiled(connect: Callable[..., Any]) -> Weighed:
    net = DDP(mlp())  # torch.compile has a rule against a first bucket that is larger than the others
    fast: Any = torch.compile(net, backend="aot_eager")
    optimizer, sink = sgd(net), MemorySink()
    with hook_up(net, optimizer, sinks=[sink]) as state:
        mass = weigh(net, optimizer, state, 6, lambda n, rank, step: backward(fast if n is net else n, rank, step))
    layouts = [[reduction.volume.size for reduction in step.reductions] for step in sink.steps]
    return Weighed(mass, parameters_of(net), layouts, all(step.phase == "sparse" for step in sink.steps))


def test_a_compiled_model() -> None:
    ranks = worlds.run("gloo", 2, compiled)
    assert all(rank.sparse and len(rank.layouts) == 6 for rank in ranks)
    assert same_bits(ranks[0].parameters, ranks[1].parameters)
    assert_conserved([rank.mass for rank in ranks])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
    "SGD with Nesterov": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True),
}


def optimizers(connect: Callable[..., Any]) -> dict[str, tuple[Parameters, Parameters, Parameters]]:
    def after(name: str, algorithm: str | None) -> Parameters:
        net = DDP(mlp(), bucket_cap_mb=CAP)
        optimizer = OPTIMIZERS[name](net.parameters())
        with hook_up(net, optimizer, algorithm=algorithm) if algorithm else contextlib.nullcontext():
            train(net, optimizer, range(8))
        return parameters_of(net)

    return {name: (after(name, None), after(name, "dense"), after(name, "oktopk")) for name in OPTIMIZERS}


def test_optimizers_of_any_kind() -> None:
    ranks = worlds.run("gloo", 2, optimizers)
    for name in OPTIMIZERS:
        plain, dense, sparse = ranks[0][name]
        assert same_bits(dense, plain), name
        assert not same_bits(sparse, plain), name
        assert same_bits(sparse, ranks[1][name][2]), name


def many_steps(connect: Callable[..., Any], layers: int) -> tuple[Parameters, list[int]]:
    net = DDP(deep(layers), bucket_cap_mb=0.0016)  # one layer in each
    optimizer, sink = sgd(net), MemorySink()
    with hook_up(net, optimizer, warmup_steps=10, sinks=[sink]):
        train(net, optimizer, range(200))
    return parameters_of(net), [len(step.reductions) for step in sink.steps]


@pytest.mark.parametrize("buckets", [2, 10])
def test_200_steps_with_several_buckets(buckets: int) -> None:
    ranks = worlds.run("gloo", 2, many_steps, buckets, timeout=110)
    for parameters, counts in ranks:
        assert counts[1:] == [buckets] * 199
        assert same_bits(parameters, ranks[0][0])


# Mistakes.


def mistakes(connect: Callable[..., Any]) -> dict[str, str]:
    first, second, third, fourth = (DDP(mlp()) for _ in range(4))
    named, unnamed = hook_up(first), hook_up(second, named=False)
    for net in (first, second):
        backward(net, 0, 0)
    heard = {"register": error_of(lambda: named.register(third))}
    for net, state, case in ((third, named, "named"), (fourth, unnamed, "unnamed")):
        net.register_comm_hook(state, oktopk.oktopk_hook)
        heard[case] = error_of(lambda net=net: backward(net, 0, 0))
    corrected = oktopk.OkTopkState(momentum=0.9)
    adam = torch.optim.Adam(fourth.parameters())
    heard["guard"] = error_of(lambda: corrected.guard(adam))
    fifth = DDP(mlp())
    heard["register with momentum"] = error_of(lambda: corrected.register(fifth, sgd(fifth, momentum=0.9)))
    corrected.guard(sgd(fifth, momentum=0.0))
    return heard


def test_mistakes_are_clear_errors() -> None:
    for heard in worlds.run("gloo", 2, mistakes):
        for case in ("register", "named", "unnamed"):
            assert "every DDP model needs an OkTopkState of its own" in heard[case], case
        assert "set that of Adam to 0, or use plain SGD" in heard["guard"]
        assert "set that of SGD to 0, or use plain SGD" in heard["register with momentum"]


def test_users_see_few_names_of_a_state() -> None:
    """What they call, and nothing of the engine."""
    names = {name for name in dir(oktopk.OkTopkState) if not name.startswith("_")}
    assert len(names) <= 12, sorted(names)
    assert names >= {"register", "guard", "state_dict", "load_state_dict", "stats", "summary", "close"}


def names_of(connect: Callable[..., Any]) -> set[str]:
    with hook_up(DDP(mlp())) as state:
        return {name for name in dir(state) if not name.startswith("_")}


def test_a_state_that_was_made_shows_no_more_names() -> None:
    """Attributes that are set later count, too."""
    (found,) = worlds.run("gloo", 1, names_of)
    assert found == {name for name in dir(oktopk.OkTopkState) if not name.startswith("_")}
