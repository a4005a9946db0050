"""Dense steps of the DDP hook go DDP's own way: same bits, lost on all ranks or on none, nothing held back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from oktopk.engine.autotune import TRIAL, Autotune
from oktopk.engine.dense_allreduce import DenseAllReduce
from oktopk.metrics.events import StepEvent
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
    hook_up,
    mlp,
    parameters_of,
    same_bits,
    sgd,
    train,
    weigh,
)

CAP = 0.003
"""MB; more than one bucket."""


class Counted:
    """How many sums this process has begun, and in which threads."""

    def __init__(self) -> None:
        self.begun, self.threads = 0, set[int]()
        begin = DenseAllReduce.begin

        def counted(sums: DenseAllReduce, *args: Any) -> None:
            self.begun += 1
            self.threads.add(threading.get_ident())
            begin(sums, *args)

        DenseAllReduce.begin = counted  # type: ignore[method-assign]


def like_ddp(connect: Callable[..., Any], cap: float, view: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    plain = DDP(mlp(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
    train(plain, sgd(plain), range(8))
    net, counted, sink = DDP(mlp(), bucket_cap_mb=cap, gradient_as_bucket_view=view), Counted(), MemorySink()
    optimizer = sgd(net)
    with hook_up(net, optimizer, sinks=[sink], **options):
        train(net, optimizer, range(8))
    assert len(counted.threads) == 1, "the hook begins sums itself, and wakes no other thread"
    return parameters_of(plain), parameters_of(net), counted.begun, sink.steps


WAYS = {"warm-up": {"warmup_steps": 8}, "algorithm": {"algorithm": "dense"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("cap", "view"), [(25.0, True), (CAP, False), (CAP, True)])
def test_they_give_the_bits_of_ddp(way: str, cap: float, view: bool) -> None:
    for plain, parameters, begun, steps in worlds.run("gloo", 3, like_ddp, cap, view, WAYS[way]):
        assert same_bits(plain, parameters)
        assert begun == sum(len(step.reductions) for step in steps)
        for step in steps:
            assert_true_figures(step)


def assert_true_figures(step: StepEvent) -> None:
    """All entries are there, with the bytes of a ring of three; times add up and no sum is counted twice."""
    assert step.volume.size == step.volume.count == sum(p.numel() for p in mlp().parameters())
    assert [one.bucket for one in step.reductions] == list(range(len(step.reductions)))
    for one in step.reductions:
        assert one.wire.modelled_bytes == 2 * 4 * one.volume.size * 2 // 3
        assert one.seconds.exchange > 0
        assert one.start <= one.spans[0].start <= one.spans[-1].stop <= one.stop
        assert one.seconds.total == pytest.approx(one.stop - one.start)
    assert step.seconds.total <= step.stop - step.start


def lost(
    connect: Callable[..., Any], name: str, cap: float, scaled: bool, auto: bool
) -> tuple[Parameters, Parameters, StepEvent, Any]:
    """Nine dense steps; in the sixth, one gradient of rank 1 is infinite."""
    bad, net, sink, counted = 5, DDP(mlp(), bucket_cap_mb=cap), MemorySink(), Counted()
    optimizer, rank = sgd(net), dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)

    def poison(grad: Tensor) -> Tensor:
        return grad * torch.inf if rank == 1 and len(sink.steps) == bad else grad

    dict(net.module.named_parameters())[name].register_hook(poison)
    with hook_up(net, optimizer, warmup_steps=20, sinks=[sink], grad_scaler=scaler, auto=auto) as state:
        seen = [parameters_of(net)]
        for step in range(9):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(parameters_of(net))
        event, residuals = sink.steps[bad], state.state_dict()["residuals"]
    assert [step.skipped for step in sink.steps] == [step == bad for step in range(9)]
    assert counted.begun == sum(len(step.reductions) for step in sink.steps)
    assert scaler.get_scale() == (512.0 if scaled else 1.0)
    return seen[bad], seen[bad + 1], event, residuals


SOMEWHERE = [
    ("0.weight", CAP, False), ("2.weight", CAP, False), ("4.bias", CAP, False),
    ("2.bias", 25.0, False), ("2.bias", 25.0, True),
]  # fmt: skip


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("name", "cap", "auto"), SOMEWHERE)
def test_a_number_that_is_not_finite_on_one_rank_loses_the_step_on_all(
    name: str, cap: float, auto: bool, scaled: bool
) -> None:
    """Wherever it is: in the bucket that comes first, or last, or in the only one. What others kept of it goes
    out later."""
    ranks = worlds.run("gloo", 3, lost, name, cap, scaled, auto)
    for before, after, event, residuals in ranks:
        assert same_bits(before, after)
        assert same_bits(after, ranks[0][1])
        assert event.culprits == (f"rank 1: {name}",)
        assert residuals == {}


def held_together(connect: Callable[..., Any], options: dict[str, Any]) -> tuple[Parameters, int]:
    """Eight dense steps of a model whose only bucket is reduced when all of it is there."""
    net, counted = DDP(mlp(), bucket_cap_mb=25.0), Counted()
    optimizer = sgd(net)
    with hook_up(net, optimizer, warmup_steps=20, auto=True, **options):
        train(net, optimizer, range(8))
    return parameters_of(net), counted.begun


@pytest.mark.parametrize("options", [{"buckets": "model"}, {"norm_clip": 1e9}], ids=str)
def test_planned_buckets_and_clipped_gradients_go_the_same_way(options: dict[str, Any]) -> None:
    """And give what they give without: the norm is far below the one to clip at."""
    plain = worlds.run("gloo", 3, held_together, {})[0][0]
    ranks = worlds.run("gloo", 3, held_together, options)
    for parameters, begun in ranks:
        assert begun == 8
        assert same_bits(parameters, ranks[0][0])
        torch.testing.assert_close(parameters, plain)


class Clock:
    """Lets steps take as long as the test says."""

    def __init__(self, dense: float, sparse: float) -> None:
        Autotune.typical = lambda tuner: (dense, sparse)  # type: ignore[method-assign]


def on_some_ranks(net: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    nn.functional.cross_entropy(net(x, other=(rank + step) % 2 == 0), y).backward()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[..., None]]] = {
    "all used": (mlp, {}, backward),
    "a branch on some ranks": (Branches, {"find_unused_parameters": True}, on_some_ranks),
    "bfloat16": (lambda: mlp(torch.bfloat16), {}, backward),
}


def turned(connect: Callable[..., Any], case: str, cap: float) -> tuple[Mass, Parameters, list[str], set[int]]:
    """Four dense steps, the trial of the sparse way, and three after the decision."""
    make, ddp, run = CASES[case]
    Clock(dense=1.0, sparse=0.5 + dist.get_rank())  # one rank would rather go on sparse
    net, sink = DDP(make(), bucket_cap_mb=cap, **ddp), MemorySink()
    optimizer = sgd(net)
    with hook_up(net, optimizer, warmup_steps=4, auto=True, sinks=[sink]) as state:
        mass = weigh(net, optimizer, state, 4 + TRIAL + 3, run)
    held = set(mass.residual)
    for size, given in mass.given.items():
        mass.residual.setdefault(size, torch.zeros_like(given))
    return mass, parameters_of(net), [step.phase for step in sink.steps], held


SEVERAL = [(case, CAP) for case in CASES]
ONE = [(case, 25.0) for case in CASES]


@pytest.mark.parametrize(("case", "cap"), SEVERAL + ONE)
def test_what_was_held_back_goes_out_when_all_turn_dense(case: str, cap: float) -> None:
    """Entry by entry; memory of residuals is given back, except where there may be something again.

    The dense steps in bfloat16 before there is a residual lose what that cannot hold, like those of DDP.
    """
    ranks = worlds.run("gloo", 3, turned, case, cap)
    for _, parameters, phases, held in ranks:
        assert phases == ["dense"] * 4 + ["sparse"] * TRIAL + ["dense"] * 3
        assert same_bits(parameters, ranks[0][1])
        assert held == set() or case != "all used"
    if case != "bfloat16":
        assert_conserved([mass for mass, *_ in ranks])
