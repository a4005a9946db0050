"""A cheap warm-up: dense sums in 16 bits, and a length that follows from that of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oktopk
from oktopk.engine import autotune
from oktopk.engine.autotune import Autotune, Schedule, plan_warmup
from oktopk.engine.settings import Settings
from oktopk.engine.step import StepReducer
from oktopk.feedback.buckets import Bucket
from oktopk.metrics.events import StepEvent
from tests.support import stepping, worlds
from tests.support.pending import LateSums
from tests.support.stepping import gradients, on_ranks, run_steps

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
ONE = Bucket(("a",), (5,))


def settings_of(values: str, warmup: int = 100, **options: Any) -> Settings:
    return Settings(oktopk.ALGORITHMS["oktopk"](), 0.4, warmup, warmup_values=values, **options)


def reduce_once(steps: StepReducer, grad: Tensor) -> StepEvent:
    now = time.perf_counter()
    steps.begin()
    steps.reduce(ONE, grad)
    return steps.finish(now, now)


# Sums in 16 bits.


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("layout", stepping.LAYOUTS)
def test_the_warm_up_sends_half_the_bytes_and_rounds_to_16_bits(layout: str, world: int, values: str) -> None:
    """The sum of each rank's rounded share, the same on all ranks to the bit; what comes after is not affected."""
    options: dict[str, Any] = {"warmup_steps": 2, "buckets": stepping.LAYOUTS[layout]}
    steps = run_steps(world, 4, warmup_values=values, **options)
    plain = run_steps(world, 4, **options)
    for step, exact in zip(steps[:2], plain[:2], strict=True):
        for record in step:
            assert stepping.same_bits(record.result, step[0].result)
            assert 2 * record.event.wire.modelled_bytes == pytest.approx(
                exact[0].event.wire.modelled_bytes, abs=20
            )
            assert record.event.volume == exact[0].event.volume
            for name, mean in exact[0].result.items():
                error = torch.finfo(FORMATS[values]).eps
                torch.testing.assert_close(
                    record.result[name], mean, rtol=error, atol=error * world * float(mean.abs().max())
                )
        assert not stepping.same_bits(step[0].result, exact[0].result)
    for step, exact in zip(steps[2:], plain[2:], strict=True):
        assert stepping.same_bits(step[0].result, exact[0].result)


def test_a_dense_step_after_the_warm_up_is_exact() -> None:
    """Where training stays dense, and for parameters that always are: 16 bits are for the warm-up alone."""
    options: dict[str, Any] = {"warmup_steps": 1, "density": [(0, None), (3, 0.05)], "dense": ["b"]}
    options["buckets"] = [["b"], ["a", "c", "d"]]
    rounded, exact = (run_steps(2, 5, warmup_values=values, **options) for values in ("bf16", "fp32"))
    same = [stepping.same_bits(a[0].result, b[0].result) for a, b in zip(rounded, exact, strict=True)]
    assert same == [False, True, True, True, True]


def test_one_rank_has_nothing_to_round() -> None:
    for step, exact in zip(run_steps(1, 3, warmup_values="fp16"), run_steps(1, 3), strict=True):
        assert stepping.same_bits(step[0].result, exact[0].result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_types_stay_as_they_are(dtype: torch.dtype) -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = StepReducer(settings_of("bf16"), LateSums(comm)), torch.arange(5.0).to(dtype)
        steps.begin()
        steps.reduce(ONE, grad)
        assert isinstance(steps.meter.inner, LateSums)
        assert steps.meter.inner.begun[0] is grad
        now = time.perf_counter()
        assert not steps.finish(now, now).skipped

    on_ranks(3, job)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("values", FORMATS)
def test_what_is_not_finite_skips_the_step_on_all_ranks(values: str, bad: float) -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = StepReducer(settings_of(values), comm), torch.arange(5.0)
        if comm.rank == 1:
            grad[3] = bad
        event = reduce_once(steps, grad)
        assert (event.skipped, event.culprits) == (True, ("rank 1: a",))
        assert not grad.any()
        assert steps.reducer.residuals.state_dict() == {}

    on_ranks(3, job)


@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("world", [2, 3, 7])
def test_large_numbers_are_clipped_and_overflow_in_no_sum(values: str, world: int) -> None:
    """A finite gradient is no reason to skip a step, though 16 bits cannot hold it."""
    most = 0.5 * torch.finfo(FORMATS[values]).max

    def job(comm: oktopk.Communicator) -> None:
        grad = torch.tensor([1.0, -1.9 * most, 0.9 * most, 0.0, 1.9 * most if comm.rank else 0.0])
        event = reduce_once(StepReducer(settings_of(values), comm), grad)
        assert not event.skipped
        expected = torch.tensor([1.0, -most, 0.9 * most, 0.0, most * (comm.world - 1) / comm.world])
        torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.0)

    on_ranks(world, job)


@pytest.mark.parametrize("values", FORMATS)
def test_a_residual_of_a_skipped_step_goes_out_rounded_too(values: str) -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = StepReducer(settings_of(values), comm), torch.full((5,), 2.0)
        steps.reducer.residuals.flat(ONE).fill_(1.0)
        assert not reduce_once(steps, grad).skipped
        torch.testing.assert_close(grad, torch.full((5,), 3.0), rtol=0.01, atol=0.0)
        assert steps.reducer.residuals.state_dict() == {}

    on_ranks(3, job)


def test_a_step_that_is_abandoned_stays_in_the_residuals() -> None:
    def job(comm: oktopk.Communicator) -> None:
        steps, grad = StepReducer(settings_of("bf16"), LateSums(comm)), torch.full((5,), 3.0)
        steps.begin()
        steps.reduce(ONE, grad)
        steps.abandon()
        torch.testing.assert_close(steps.reducer.residuals.flat(ONE), torch.full((5,), 3.0), rtol=0.01, atol=0.0)

    on_ranks(3, job)


def test_a_scale_is_taken_off_before_rounding() -> None:
    """A GradScaler's scale would overflow 16 bits."""

    def scaled(rank: int, step: int, grads: stepping.Grads) -> None:
        for grad in grads.values():
            grad.mul_(2.0**20)

    plain = run_steps(2, 2, warmup_values="fp16")
    others = run_steps(2, 2, scaled, warmup_values="fp16", grad_scaler=stepping.FixedScale(2.0**20))
    for one, other in zip(plain, others, strict=True):
        torch.testing.assert_close(stepping.flat(one[0].result), stepping.flat(other[0].result) / 2.0**20)


def over_gloo(connect: Callable[..., oktopk.Communicator]) -> list[stepping.Grads]:
    found = []
    for values in FORMATS:
        comm = connect(timeout=60.0)
        with stepping.reducer_on(comm, warmup_steps=3, warmup_values=values) as reducer:
            found += [reducer.sync(gradients(comm.rank, step)) for step in range(3)]
    return found


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_processes_sum_16_bits_to_the_same_bits(transport: str) -> None:
    first, *rest = worlds.run(transport, 3, over_gloo)
    for other in rest:
        assert all(stepping.same_bits(one, two) for one, two in zip(first, other, strict=True))
    exact = run_steps(3, 3, warmup_steps=3)
    for step, result in zip([*exact, *exact], first, strict=True):
        torch.testing.assert_close(stepping.flat(result), stepping.flat(step[0].result), rtol=0.05, atol=0.05)


def test_dense_steps_in_16_bits_are_not_timed_for_auto() -> None:
    """A step that stays dense is summed in 32 bits: four of those come first, whatever the warm-up has been."""
    settings = settings_of("fp16", 6, auto=True)
    tuner = Autotune(settings)
    for step in range(30):
        tuner.record(step, tuner.density(step) is None, 1.0 if step < 6 else 4.0)
    assert [tuner.density(step) is None for step in range(18)] == [True] * 10 + [False] * 8
    assert tuner.typical()[0] == 4.0
    assert [tuner.warms_up(step) for step in (0, 5, 6)] == [True, True, False]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown warmup_values 'e4m3': choose one of fp32, fp16, bf16"):
        stepping.reducer_on(None, warmup_values="e4m3")


# The length.


@given(st.integers(1, 10**6))
def test_warm_up_and_ramp_are_shares_of_the_run_up_to_a_limit(total: int) -> None:
    dense, ramp = plan_warmup(total)
    assert dense == min(autotune.LONGEST_WARMUP, math.ceil(autotune.WARMUP_SHARE * total)) >= 1
    assert ramp == min(autotune.LONGEST_RAMP, math.ceil(autotune.RAMP_SHARE * total)) >= 1
    longer = plan_warmup(total + 1)
    assert longer[0] >= dense
    assert longer[1] >= ramp


def test_without_a_length_the_warm_up_follows_from_total_steps() -> None:
    dense, ramp = plan_warmup(100)
    steps = run_steps(2, dense + ramp + 2, warmup_steps=None, total_steps=100, density=0.05)
    counts = [step[0].event.target_count for step in steps]
    assert counts[:dense] == [stepping.SIZE] * dense
    assert counts[dense] == int(0.25 * stepping.SIZE)
    assert counts[dense + ramp :] == [int(0.05 * stepping.SIZE)] * 2
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (128, 0)),
        ({"total_steps": 500}, (128, 0)),
        ({"warmup_steps": 7, "total_steps": 500}, (7, 0)),
        ({"warmup_steps": None, "total_steps": 500}, plan_warmup(500)),
        ({"warmup_steps": None, "total_steps": 500, "ramp_steps": 3}, (plan_warmup(500)[0], 3)),
        ({"warmup_steps": None, "total_steps": 500, "ramp_steps": 0}, (plan_warmup(500)[0], 0)),
        ({"warmup_steps": None}, plan_warmup(autotune.SHORT_RUN)),
    ],
)
def test_what_is_given_stays(given: dict[str, Any], expected: tuple[int, int]) -> None:
    """Settings have 128 steps, whatever the run: item 8."""
    schedule = Schedule.of(Settings(oktopk.ALGORITHMS["oktopk"](), **given))
    assert (schedule.warmup_steps, schedule.ramp_steps) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warmup_steps": None, "total_steps": 0}, "total_steps must be an integer of at least 1, got 0"),
        ({"total_steps": 1.5}, "total_steps must be an integer"),
    ],
)
def test_a_length_that_cannot_be_known_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepping.reducer_on(None, **wrong)
