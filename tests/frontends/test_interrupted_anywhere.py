"""Ctrl-C at every line of a step, caught, as in a notebook: an error afterwards, or the right state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from oktopk.comm import failure_board
from oktopk.utils.timeouts import TIMEOUTS
from tests.support import worlds
from tests.support.interrupting import InterruptAt
from tests.support.stepping import assert_same_state, gradients, on_ranks, reducer_on, same_bits
from tests.support.training import DDP, backward, hook_up, mlp, sgd
from tests.support.wrapping import loss_of, make_model, plain_sgd, values, wrap

DENSE, SPARSE, STEPS = 2, 4, 6
"""The steps in which ranks are interrupted; three are dense, and buckets are as they stay."""
Outcome = tuple[dict[str, Tensor], dict[str, Any]]
Loop = Callable[[oktopk.Communicator, Callable[[int], InterruptAt]], Outcome]


def wrapped(comm: oktopk.Communicator, watch: Callable[[int], InterruptAt]) -> Outcome:
    """A loop that goes on after Ctrl-C with the step that is next."""
    model = make_model()
    with wrap(model, comm, plain_sgd, warmup_steps=3) as optimizer:
        while (step := optimizer._engine.step) < STEPS:
            try:
                with watch(step):
                    optimizer.zero_grad()
                    loss_of(model, comm.rank, step).backward()
                    optimizer.step()
            except KeyboardInterrupt:
                continue
        return values(model), optimizer.state_dict()["oktopk"]


def by_hand(comm: oktopk.Communicator, watch: Callable[[int], InterruptAt]) -> Outcome:
    applied: dict[str, Tensor] = {}
    with reducer_on(comm, warmup_steps=3) as reducer:
        while (step := reducer.step) < STEPS:
            try:
                with watch(step):
                    result = reducer.sync(gradients(comm.rank, step))
                    applied |= {f"{name} {step}": mean for name, mean in result.items()}
            except KeyboardInterrupt:
                continue
        return applied, reducer.state_dict()


LOOPS: dict[str, Loop] = {"optimizer": wrapped, "by hand": by_hand}


def run(loop: Loop, interrupted: dict[int, InterruptAt], when: int) -> list[Outcome]:
    def rank(comm: oktopk.Communicator) -> Outcome:
        return loop(
            comm, lambda step: interrupted.get(comm.rank, InterruptAt()) if step == when else InterruptAt()
        )

    return on_ranks(2, rank, timeout=1.0)


@pytest.mark.parametrize("everybody", [False, True], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("when", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_caught_interrupt_is_an_error_or_harmless(name: str, when: int, everybody: bool) -> None:
    loop, count = LOOPS[name], InterruptAt()
    undisturbed = run(loop, {0: count}, when)
    assert count.lines > 100
    said: list[RuntimeError] = []
    for at in range(1 + everybody, count.lines + 1, 9):
        interrupted = {0: InterruptAt(at), **({1: InterruptAt((at * 5) % count.lines + 1)} if everybody else {})}
        try:
            outcomes = run(loop, interrupted, when)
        except RuntimeError as error:
            said.append(error)
            continue
        for outcome, expected in zip(outcomes, undisturbed, strict=True):
            assert same_bits(outcome[0], expected[0]), at
            assert_same_state(outcome[1], expected[1], but=["autotune"])
    assert len(said) > 10
    for error in said:
        known = "interrupted mid-step" in str(error) or "being averaged" in str(error)
        assert known or isinstance(error, oktopk.OkTopkError), error


def test_a_mean_that_one_rank_did_not_apply_is_an_error() -> None:
    """Ctrl-C between synchronize() and step(): the other rank has applied it, so it is found in the next step."""

    def rank(comm: oktopk.Communicator, everybody: bool, when: int) -> dict[str, Tensor]:
        model = make_model()
        with wrap(model, comm, plain_sgd, warmup_steps=3) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                optimizer.synchronize()
                if step == when and (everybody or comm.rank == 0):
                    continue
                optimizer.step()
            return values(model)

    for when in (DENSE, SPARSE):
        with pytest.raises(oktopk.OkTopkError):
            on_ranks(2, lambda comm, when=when: rank(comm, False, when), timeout=1.0)
        first, second = on_ranks(2, lambda comm, when=when: rank(comm, True, when))
        assert same_bits(first, second)


def in_the_middle_of_backward(connect: Callable[..., Any], guarded: bool) -> list[str]:
    """Of one rank only, outside of the hook; it catches the interrupt and goes on."""
    found = []
    for when in (DENSE, SPARSE):
        net = DDP(mlp(), bucket_cap_mb=0.001)
        optimizer = sgd(net)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with hook_up(net, optimizer, guarded, warmup_steps=3, timeout=2) as state:
            try:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    handle = net.module[0].register_full_backward_pre_hook(interrupt)
                    if step != when or dist.get_rank() != 0:
                        handle.remove()
                    try:
                        backward(net, dist.get_rank(), step)
                    except KeyboardInterrupt:
                        handle.remove()
                        continue
                    optimizer.step()
                found.append("no error")
            except RuntimeError as error:
                found.append(type(error).__name__)
        del state
        dist.barrier()
    return found


def test_an_interrupt_between_the_buckets_of_one_rank_is_an_error() -> None:
    """That rank drops the step and begins again; its buckets must not be summed with others of the old step."""
    for found in worlds.run("gloo", 2, in_the_middle_of_backward, True):
        assert "no error" not in found


def interrupt_hook(connect: Callable[..., Any]) -> list[tuple[str | None, ...]]:
    """Rank 0 is interrupted at lines of the hook and of the guard, and goes on with the step that is next."""
    failure_board.TIMEOUTS = replace(TIMEOUTS, failure_notes=0.1)  # type: ignore[attr-defined]
    outcomes = []
    for when, stride in ((DENSE, 31), (SPARSE, 17)):
        lines = _interrupted_ddp(when, None)[0]
        outcomes += [_interrupted_ddp(when, at)[1:] for at in range(1, lines + 1, stride)]
    return outcomes


def _interrupted_ddp(when: int, at: int | None) -> tuple[int, str | None, str | None]:
    """How many lines there were, how training ended, and whether the state could be saved after the interrupt."""
    net = DDP(mlp(), bucket_cap_mb=0.001)
    optimizer, interrupt, problem, saving = sgd(net), InterruptAt(at), None, None
    dist.barrier()
    with hook_up(net, optimizer, True, warmup_steps=3, timeout=5) as state:
        try:
            while (step := state.step) < STEPS:
                try:
                    with interrupt if step == when and dist.get_rank() == 0 else InterruptAt():
                        optimizer.zero_grad()
                        backward(net, dist.get_rank(), step)
                        optimizer.step()
                except KeyboardInterrupt:
                    saving = _error_of(state.state_dict)
        except RuntimeError as error:
            problem = str(error)
    lines = torch.tensor(interrupt.lines)
    dist.broadcast(lines, 0)
    return int(lines), problem, saving


def _error_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return None


def test_the_hook_does_not_go_on_after_an_interrupt() -> None:
    """DDP itself refuses a model whose backward pass was interrupted; the other rank is told. Once a bucket was
    handed in, the state cannot be saved without it."""
    first, second = worlds.run("gloo", 2, interrupt_hook)
    assert len(first) > 15
    assert all(problem is not None for problem, _ in (*first, *second))
    refused = [saving for _, saving in first if saving is not None]
    assert len(refused) > len(first) // 2
    assert all("interrupted mid-step" in saving or "a step is under way" in saving for saving in refused)
