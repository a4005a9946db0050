"""A number that is not finite, anywhere: the step is lost on all ranks, and nothing else is."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

import oktopk
from tests.support import stepping
from tests.support.stepping import (
    COUNTERS,
    HISTORY,
    LAYOUTS,
    SEVERAL,
    SHAPES,
    Edit,
    Grads,
    Record,
    assert_laws,
    assert_mass,
    run_steps,
)

STEPS = 6
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
ALGORITHMS = list(oktopk.ALGORITHMS)
WARMUP = {"warm-up": 100, "sparse phase": 2}


def spoil(bad_rank: int, bad_steps: tuple[int, ...], name: str, value: float) -> Edit:
    def edit(rank: int, step: int, grads: Grads) -> None:
        if rank == bad_rank and step in bad_steps:
            grads[name].view(-1)[1] = value

    return edit


def bucket_of(name: str) -> int:
    return next(index for index, names in enumerate(SEVERAL) if name in names)


def assert_lost(step: list[Record], name: str, layout: str) -> None:
    """Nothing came out, and nothing is lost of what went in."""
    for record in step:
        assert record.event.skipped
        assert all(part.skipped for part in record.event.reductions)
        assert not any(bool(result.any()) for result in record.result.values())
        assert record.event.culprits == step[0].event.culprits
        if layout == "one bucket":
            known = bool(record.before["buckets"])  # before the very first step there are none
            stepping.assert_same_state(
                record.before, record.after, but=HISTORY if known else (*HISTORY, "buckets")
            )
    if layout == "several buckets":
        first_lost = bucket_of(name)
        exchanged = [n for names in SEVERAL[:first_lost] for n in names]
        if exchanged:
            assert_mass(step, exchanged)
        for record in step:
            assert_untouched(record, first_lost)


def assert_untouched(record: Record, first_lost: int) -> None:
    names = [name for names in SEVERAL[first_lost:] for name in names]
    for memory in ("residuals", "velocities"):
        kept = {name: record.before[memory][name] for name in names if name in record.before[memory]}
        now = {name: record.after[memory][name] for name in names if name in record.after[memory]}
        stepping.assert_same_state({memory: kept}, {memory: now})
    for index, entry in enumerate(record.before["buckets"][first_lost:], first_lost):
        assert record.after["buckets"][index] == entry
    before, after = (
        [group for group in state["groups"] if max(group["buckets"]) >= first_lost]
        for state in (record.before, record.after)
    )
    assert after == before


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("phase", WARMUP)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_bad_number_costs_one_step_and_no_mass(algorithm: str, layout: str, phase: str, kind: str) -> None:
    dice = Random(f"{algorithm}{layout}{phase}{kind}")
    world = dice.choice((1, 2, 2, 3, 3, 5))
    rank, name = dice.randrange(world), dice.choice(list(SHAPES))
    bad = dice.randrange(0 if phase == "warm-up" else 2, STEPS - 1)
    edit = spoil(rank, (bad,), name, BAD[kind])

    steps = run_steps(world, STEPS, edit, algorithm, warmup_steps=WARMUP[phase], buckets=LAYOUTS[layout])

    assert_laws(steps)
    assert [step[0].event.skipped for step in steps] == [t == bad for t in range(STEPS)]
    assert_lost(steps[bad], name, layout)
    assert steps[bad][0].event.culprits == (f"rank {rank}: {name}",)
    for record in steps[-1]:
        assert [record.after[counter] for counter in COUNTERS] == [STEPS, 1, 0]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_one_bucket_the_run_goes_on_as_if_the_step_had_not_been(algorithm: str, world: int) -> None:
    edit = spoil(world - 1, (4,), "c", math.nan)

    def job(comm: oktopk.Communicator) -> None:
        with stepping.reducer_on(comm, algorithm) as reducer:
            records = stepping.record_steps(reducer, comm.rank, range(9), edit)
        with stepping.reducer_on(comm, algorithm) as other:
            other.load_state_dict(records[4].before | {"step": 5})
            expected = stepping.record_steps(other, comm.rank, range(5, 9))
        for record, without in zip(records[5:], expected, strict=True):
            assert stepping.same_bits(record.result, without.result)
            stepping.assert_same_state(record.after, without.after, but=HISTORY)

    stepping.on_ranks(world, job)


@pytest.mark.parametrize(("layout", "world"), [("one bucket", 2), ("one bucket", 5), ("several buckets", 3)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sum_that_overflows(algorithm: str, layout: str, world: int) -> None:
    """Where entries are added before they are divided, finite ones can overflow; others just give the mean."""

    def edit(rank: int, step: int, grads: Grads) -> None:
        if step == 4:
            grads["a"].view(-1)[5] = 3e38

    steps = run_steps(world, STEPS, edit, algorithm, buckets=LAYOUTS[layout])
    assert_laws(steps)
    event = steps[4][0].event
    assert event.skipped == (algorithm in ("topkdsa", "gtopk", "oktopk", "oktopk-static"))
    if event.skipped:
        assert_lost(steps[4], "a", layout)
        assert event.culprits == ("the sum over ranks, which overflows",)
    else:
        assert steps[4][0].result["a"].view(-1)[5] == pytest.approx(3e38)
    assert not any(step[0].event.skipped for step in steps[5:])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_a_residual_that_would_overflow(algorithm: str, world: int) -> None:
    """Too many huge entries to send at once: the next ones do not fit on top of what stayed back."""

    def edit(rank: int, step: int, grads: Grads) -> None:
        if rank == 0 and step in (3, 4):
            grads["c"].fill_(2e38)

    steps = run_steps(world, STEPS, edit, algorithm, warmup_steps=1)
    assert_laws(steps)
    assert [t for t, step in enumerate(steps) if step[0].event.skipped] == [4]
    assert steps[4][0].event.culprits == ("rank 0: c",)


@pytest.mark.parametrize("algorithm", ["dense", "topka", "oktopk"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("warmup", [0, 100])
def test_a_grad_scaler_gets_nan(algorithm: str, layout: str, warmup: int) -> None:
    edit = spoil(1, (3,), "d", math.inf)
    options = {"buckets": LAYOUTS[layout], "warmup_steps": warmup, "grad_scaler": stepping.FixedScale(8.0)}
    steps = run_steps(2, 6, edit, algorithm, **options)
    for t, step in enumerate(steps):
        for record in step:
            assert record.event.skipped == (t == 3)
            stepping.assert_finite(record.after)
            for result in record.result.values():
                assert bool((result.isnan() if t == 3 else result.isfinite()).all())
    if layout == "one bucket":
        for record in steps[3]:
            stepping.assert_same_state(record.before, record.after, but=HISTORY)


@pytest.mark.parametrize("name", ["a", "d"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_parameters_that_always_go_dense(algorithm: str, layout: str, name: str) -> None:
    """The bad number is in an excluded parameter (d), or in another one beside it (a)."""
    edit = spoil(1, (4,), name, math.nan)
    steps = run_steps(3, STEPS, edit, algorithm, buckets=LAYOUTS[layout], dense=["d", "c"])
    assert_laws(steps)
    assert [t for t, step in enumerate(steps) if step[0].event.skipped] == [4]
    assert_lost(steps[4], name, layout)
    where = "the sum over ranks" if name == "d" else "rank 1"  # of dense entries only the sum is seen
    assert steps[4][0].event.culprits == (f"{where}: {name}",)


@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_what_a_lost_step_put_back_survives_the_next_one(algorithm: str) -> None:
    """Step 3 is lost in the last bucket, so d has a residual; step 4 is lost in the bucket of d itself."""

    def edit(rank: int, step: int, grads: Grads) -> None:
        if rank == 1 and step in (3, 4):
            grads["b" if step == 3 else "a"].view(-1)[0] = math.nan

    steps = run_steps(2, STEPS, edit, algorithm, buckets=SEVERAL, dense=["d"])
    assert_laws(steps)
    assert_lost(steps[3], "b", "several buckets")
    assert bool(steps[4][0].before["residuals"]["d"].any())
    assert_lost(steps[4], "a", "several buckets")
    assert not steps[5][0].after["residuals"]["d"].any()


@pytest.mark.parametrize("algorithm", stepping.SPARSE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("warmup", [1, 100])
def test_velocities_of_a_lost_step(algorithm: str, layout: str, warmup: int) -> None:
    """Untouched where nothing was sent; otherwise advanced, nothing masked, and in the residual as a whole."""
    edit = spoil(0, (4,), "b", math.nan)
    steps = run_steps(
        2, 5, edit, algorithm, buckets=LAYOUTS[layout], warmup_steps=warmup, momentum=0.5, dense=["d"]
    )
    assert [t for t, step in enumerate(steps) if step[0].event.skipped] == [4]
    for record in (record for step in steps for record in step):
        stepping.assert_finite(record.after)
    if layout == "one bucket":
        assert_lost(steps[4], "b", layout)
        return
    for record in steps[4]:
        assert_untouched(record, bucket_of("b"))
    exchanged = ["c", "a", "d"]
    velocity, residual_before, residual_after = (
        torch.stack([stepping.flat(getattr(record, when)[memory], exchanged) for record in steps[4]])
        for when, memory in (("after", "velocities"), ("before", "residuals"), ("after", "residuals"))
    )
    expected = torch.stack(
        [
            0.5 * stepping.flat(r.before["velocities"], exchanged) + stepping.flat(r.grads, exchanged)
            for r in steps[4]
        ]
    )
    torch.testing.assert_close(velocity.sum(0), expected.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual_after.sum(0), (residual_before + velocity).sum(0), rtol=1e-5, atol=1e-5)
