"""The front ends are one algorithm: hook, wrapper, loop and a simulation in one process end with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from tests.support import worlds
from tests.support.training import (
    DDP,
    Parameters,
    Run,
    backward,
    hook_up,
    mlp,
    parameters_of,
    same_bits,
    sgd,
    train,
    with_hook,
    with_loop,
    with_wrapper,
)

STEPS, WARMUP, DENSITY = 50, 5, 0.05
OPTIONS = {"density": DENSITY, "warmup_steps": WARMUP, "auto": False, "timeout": 30.0, "values": "fp32"}
NAMES = list(dict(mlp().named_parameters()))
SEVERAL = [["4.weight", "4.bias"], ["2.bias", "0.weight"], ["2.weight", "0.bias"]]
PLANS = {"model": "model", "several": SEVERAL}
FRONT_ENDS = {"hook": with_hook, "wrapper": with_wrapper, "loop": with_loop}
Layout = Sequence[Sequence[str]]


def front_ends(connect: Callable[..., Any]) -> dict[tuple[str, str], Run]:
    runs = {
        (front_end, plan): train_with(PLANS[plan], STEPS, **OPTIONS)
        for front_end, train_with in FRONT_ENDS.items()
        for plan in PLANS
    }
    return runs | {("hook", "of DDP"): with_hook(None, STEPS, **OPTIONS)}


# The simulation: no front end, no process, only gradients, the bare collective and an optimizer per rank.


def dense_sum(parts: list[Tensor]) -> list[Tensor]:
    """By gloo, in one group for each thread: only its own ring adds in its own order."""
    store = dist.HashStore()

    def reduce(comm: oktopk.Communicator) -> Tensor:
        group = dist.ProcessGroupGloo(store, comm.rank, comm.world, timedelta(seconds=30))
        group.allreduce([parts[comm.rank]]).wait()
        return parts[comm.rank]

    return oktopk.run_threads(len(parts), reduce) if len(parts) > 1 else parts


class Simulation:
    """P replicas of the model, trained one after the other, with all that ranks remember."""

    def __init__(self, world: int) -> None:
        self.nets = [mlp() for _ in range(world)]
        self.optimizers = [sgd(net) for net in self.nets]
        self.residuals = [
            {name: torch.zeros(p.numel()) for name, p in mlp().named_parameters()} for _ in self.nets
        ]
        self.states: dict[tuple[str, ...], list[Any]] = {}

    def step(self, step: int, layout: Layout) -> None:
        for rank, net in enumerate(self.nets):
            self.optimizers[rank].zero_grad()
            backward(net, rank, step)
        for names in layout:
            self.reduce(step, tuple(names))
        for optimizer in self.optimizers:
            optimizer.step()

    def reduce(self, step: int, names: tuple[str, ...]) -> None:
        grads = [{name: p.grad for name, p in net.named_parameters()} for net in self.nets]
        flats = [torch.cat([own[name].flatten() for name in names]) for own in grads]
        sizes = [self.residuals[0][name].numel() for name in names]
        if step < WARMUP:
            means = dense_sum([flat * (1.0 / len(flats)) for flat in flats])
        else:
            means = self.sparse_mean(step, names, flats, sizes)
        for own, mean in zip(grads, means, strict=True):
            for name, part in zip(names, mean.split(sizes), strict=True):
                own[name].copy_(part.view_as(own[name]))

    def sparse_mean(
        self, step: int, names: tuple[str, ...], flats: list[Tensor], sizes: list[int]
    ) -> list[Tensor]:
        residuals = [torch.cat([own[name] for name in names]) for own in self.residuals]
        states = self.states.get(names, [None] * len(flats))

        def reduce(comm: oktopk.Communicator) -> tuple[Tensor, oktopk.Info]:
            return oktopk.sparse_allreduce(
                flats[comm.rank], DENSITY, residual=residuals[comm.rank], comm=comm, state=states[comm.rank],
                step=step,
            )  # fmt: skip

        outcomes = oktopk.run_threads(len(flats), reduce)
        self.states[names] = [info.state for _, info in outcomes]
        for own, residual in zip(self.residuals, residuals, strict=True):
            own |= dict(zip(names, residual.split(sizes), strict=True))
        return [mean for mean, _ in outcomes]


def simulate(world: int, layouts: Sequence[Layout]) -> list[Parameters]:
    simulation = Simulation(world)
    for step, layout in enumerate(layouts):
        simulation.step(step, layout)
    return [parameters_of(net) for net in simulation.nets]


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Run]]:
    return worlds.run("gloo", request.param, front_ends, timeout=110)


@pytest.mark.parametrize("plan", PLANS)
def test_every_front_end_has_the_bits_of_the_simulation(ranks: list[dict[Any, Run]], plan: str) -> None:
    layout = [NAMES] if plan == "model" else SEVERAL
    expected = simulate(len(ranks), [layout] * STEPS)
    for front_end in FRONT_ENDS:
        for rank, runs in enumerate(ranks):
            assert runs[front_end, plan].sparse_steps == STEPS - WARMUP
            assert same_bits(runs[front_end, plan].parameters, expected[rank]), f"{front_end}, rank {rank}"


def test_the_hook_has_them_in_the_buckets_of_ddp_too(ranks: list[dict[Any, Run]]) -> None:
    run = ranks[0]["hook", "of DDP"]
    assert run.sparse_steps == STEPS - WARMUP
    assert len(run.layouts) == STEPS
    assert len(run.layouts[0]) < len(run.layouts[1]), "DDP was to rebuild its buckets"
    for expected, runs in zip(simulate(len(ranks), run.layouts), ranks, strict=True):
        assert same_bits(runs["hook", "of DDP"].parameters, expected)


def test_replicas_are_identical(ranks: list[dict[Any, Run]]) -> None:
    for case, run in ranks[0].items():
        assert not same_bits(run.parameters, parameters_of(mlp()))
        for other in ranks[1:]:
            assert same_bits(run.parameters, other[case].parameters)


# Dense, and density 1.


def trained(
    algorithm: str | None, dtype: torch.dtype = torch.float32, density: float = 1.0, **ddp: Any
) -> Parameters:
    """After ten steps; without an algorithm DDP has no hook."""
    net = DDP(mlp(dtype), bucket_cap_mb=0.003, **ddp)
    optimizer = sgd(net)
    state = hook_up(net, optimizer, algorithm=algorithm, density=density, values="fp32") if algorithm else None
    train(net, optimizer, range(10))
    if state is not None:
        assert state.step == 10
        state.close()
    return parameters_of(net)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dense_and_plain(connect: Callable[..., Any]) -> dict[Any, tuple[Parameters, Parameters]]:
    cases = [(dtype, view) for dtype in DTYPES for view in (False, True)]
    return {
        (dtype, view): (
            trained("dense", dtype, gradient_as_bucket_view=view),
            trained(None, dtype, gradient_as_bucket_view=view),
        )
        for dtype, view in cases
    }


@pytest.mark.parametrize("world", [2, 3])
def test_dense_has_the_bits_of_plain_ddp(world: int) -> None:
    for rank in worlds.run("gloo", world, dense_and_plain):
        for case, (dense, plain) in rank.items():
            assert not same_bits(plain, parameters_of(mlp(case[0])))
            assert same_bits(dense, plain), case


def at_full_density(connect: Callable[..., Any]) -> dict[str, Parameters]:
    return {name: trained(name) for name in oktopk.ALGORITHMS}


def test_density_one_is_dense_but_for_rounding() -> None:
    for rank in worlds.run("gloo", 3, at_full_density):
        for name, parameters in rank.items():
            torch.testing.assert_close(
                parameters, rank["dense"], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
