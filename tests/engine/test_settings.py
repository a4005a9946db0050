"""What the settings do to a step: warm-up, ramp, clipping, exclusion, scaling, formats, missing gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from tests.support import stepping
from tests.support.stepping import LAYOUTS, SHAPES, SIZE, SPARSE, flat, gradients, run_steps

STEPS = 6
DENSE_SIZE = 31 + 3
"""Entries of b and d."""


def mean_gradient(world: int, step: int) -> dict[str, Tensor]:
    """By rank-ordered sum of shares, as ranks on threads add up."""
    shares = [{name: grad / world for name, grad in gradients(rank, step).items()} for rank in range(world)]
    return {name: sum((share[name] for share in shares[1:]), shares[0][name]) for name in SHAPES}


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_before_warmup_steps_are_dense_and_from_it_on_sparse(layout: str, warmup: int) -> None:
    steps = run_steps(2, 5, warmup_steps=warmup, buckets=LAYOUTS[layout])
    for t, step in enumerate(steps):
        for record in step:
            phases = {part.phase for part in record.event.reductions}
            assert phases == {"dense" if t < warmup else "sparse"}
            assert record.event.step == t
            if t < warmup:
                assert stepping.same_bits(record.result, mean_gradient(2, t))


@pytest.mark.parametrize(
    ("given", "dense", "target"),
    [
        ({"density": 0.1}, 128, 32),
        ({"density": 0.1, "warmup_steps": 3}, 3, 32),
        ({"warmup_steps": 3}, 3, 3),
        ({}, 5, 81),
        ({"total_steps": 1000}, 10, 81),
        ({"density": 0.1, "total_steps": 1000}, 10, 81),
    ],
)
def test_the_warm_up_is_short_where_neither_it_nor_a_density_is_given(
    given: dict[str, Any], dense: int, target: int
) -> None:
    """With a density it is 128 steps, item 8. A warm-up that is a share of the run ends in a ramp from 25 %."""

    def job(comm: oktopk.Communicator) -> list[tuple[str, int]]:
        steps = []
        with oktopk.AllReducer(stepping.parameters().items(), comm=comm, buckets="model", **given) as reducer:
            for _ in range(dense + 1):
                reducer.sync({"b": torch.ones(31)})
                assert reducer.last is not None
                steps.append((reducer.last.phase, reducer.last.target_count))
        return steps

    ((*warmup, last),) = stepping.on_ranks(1, job)
    assert [phase for phase, _ in warmup] == ["dense"] * dense
    assert last == ("sparse", target)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_the_density_comes_down_by_the_same_factor_on_each_ramp_step(algorithm: str) -> None:
    steps = run_steps(2, 5, algorithm=algorithm, warmup_steps=1, ramp_steps=2, density=0.01)
    expected = [SIZE, int(SIZE * 0.25), int(SIZE * 0.05), int(SIZE * 0.01), int(SIZE * 0.01)]
    assert [step[0].event.target_count for step in steps] == expected
    for step, k in zip(steps[1:], expected[1:], strict=True):
        assert 2 * k / 3 - 1 <= step[0].event.local_count <= 4 * k / 3 + 1


# Clipping.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_norm_clip_scales_the_whole_gradient_before_compression(layout: str, warmup: int, clip: float) -> None:
    """Residual and mean of the first step have exactly the mass of the clipped gradients."""
    world, options = 3, {"norm_clip": clip, "warmup_steps": warmup, "buckets": LAYOUTS[layout]}
    (step,) = run_steps(world, 1, algorithm="topka", **options)
    whole = torch.zeros(SIZE, dtype=torch.float64)
    for rank in range(world):
        grad = flat(gradients(rank, 0))
        whole += grad * min(1.0, clip / float(grad.norm()))
    there_is = sum(flat(record.after["residuals"]) for record in step) + world * flat(step[0].result)
    torch.testing.assert_close(there_is, whole, rtol=1e-5, atol=1e-6)


def test_norm_clip_is_in_unscaled_units() -> None:
    def scaled(rank: int, step: int, grads: stepping.Grads) -> None:
        for grad in grads.values():
            grad.mul_(64.0)

    plain = run_steps(2, 4, norm_clip=0.5)
    with_scaler = run_steps(2, 4, scaled, norm_clip=0.5, grad_scaler=stepping.FixedScale(64.0))
    for one, other in zip(plain, with_scaler, strict=True):
        torch.testing.assert_close(flat(one[0].result), flat(other[0].result) / 64.0)


# Parameters that always go dense.


@pytest.mark.parametrize("chosen", [{"dense": ["b", "[d-z]"]}, {"dense_below": 32}], ids=["by name", "by size"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", SPARSE)
def test_excluded_parameters_get_the_dense_mean(algorithm: str, layout: str, chosen: dict[str, Any]) -> None:
    for t, step in enumerate(
        run_steps(3, STEPS, algorithm=algorithm, buckets=LAYOUTS[layout], warmup_steps=2, **chosen)
    ):
        expected = mean_gradient(3, t)
        for record in step:
            for name in ("b", "d"):
                torch.testing.assert_close(record.result[name], expected[name], rtol=1e-5, atol=1e-6)
                assert not record.after["residuals"].get(name, torch.zeros(1)).any()
        stepping.assert_laws([step])


@pytest.mark.parametrize("algorithm", SPARSE)
def test_excluded_parameters_are_never_selected(algorithm: str) -> None:
    """However large they are, k entries of the others go out, and the payload has both."""

    def huge(rank: int, step: int, grads: stepping.Grads) -> None:
        grads["b"].fill_(1e6)

    k = int((SIZE - DENSE_SIZE) * 0.05)
    for step in run_steps(2, 3, huge, algorithm, warmup_steps=0, dense=["b", "d"]):
        others = sum(int(step[0].result[name].count_nonzero()) for name in ("a", "c"))
        assert 2 * k / 3 <= others <= 2 * 4 * k / 3
        event = step[0].event
        assert event.target_count == k + DENSE_SIZE
        assert event.volume.payload_bytes == 8 * others + 4 * DENSE_SIZE


def test_a_bucket_of_excluded_parameters_is_a_dense_one() -> None:
    steps = run_steps(2, 3, buckets=[["b", "d"], ["a", "c"]], warmup_steps=0, dense=["b", "d"])
    for t, step in enumerate(steps):
        assert [part.phase for part in step[0].event.reductions] == ["dense", "sparse"]
        expected = mean_gradient(2, t)
        assert all(torch.equal(step[0].result[name], expected[name]) for name in ("b", "d"))


# Scaled gradients.


@pytest.mark.parametrize("algorithm", list(oktopk.ALGORITHMS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_residuals_live_in_unscaled_units(algorithm: str, layout: str) -> None:
    """A scale that is a power of two, even one that changes, gives the same bits as none."""

    def job(comm: oktopk.Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.ones(()))  # makes its scale
        options = {"buckets": LAYOUTS[layout], "warmup_steps": 2, "momentum": 0.5}
        with (
            stepping.reducer_on(comm, algorithm, **options) as plain,
            stepping.reducer_on(comm, algorithm, grad_scaler=scaler, **options) as scaled,
        ):
            for step in range(STEPS):
                scale = 1024.0 * 2 ** (step // 2)
                scaler.update(scale)
                grads = gradients(comm.rank, step)
                expected = plain.sync({name: grad.clone() for name, grad in grads.items()})
                result = scaled.sync({name: grad * scale for name, grad in grads.items()})
                assert stepping.same_bits(expected, {name: grad / scale for name, grad in result.items()})
                stepping.assert_same_state(plain.state_dict(), scaled.state_dict(), but=["scaled"])

    stepping.on_ranks(2, job)


@pytest.mark.parametrize("algorithm", list(oktopk.ALGORITHMS))
def test_a_scaled_step_that_overflows_leaves_residuals_untouched(algorithm: str) -> None:
    def overflow(rank: int, step: int, grads: stepping.Grads) -> None:
        if rank == 0 and step == 3:
            grads["a"][2, 2] = math.inf

    steps = run_steps(2, 5, overflow, algorithm, grad_scaler=stepping.FixedScale(2.0))
    assert [step[0].event.skipped for step in steps] == [False, False, False, True, False]
    for record in steps[3]:
        stepping.assert_same_state(record.before, record.after, but=stepping.HISTORY)


# Formats, and what is given.


@pytest.mark.parametrize("values", ["fp16", "bf16"])
@pytest.mark.parametrize("algorithm", SPARSE)
def test_what_rounding_on_the_wire_loses_stays_in_the_residual(algorithm: str, values: str) -> None:
    narrow = run_steps(3, 4, algorithm=algorithm, warmup_steps=1, values=values)
    wide = run_steps(3, 4, algorithm=algorithm, warmup_steps=1)
    stepping.assert_laws(narrow)
    assert sum(s[1].event.wire.sent_bytes for s in narrow[1:]) < sum(s[1].event.wire.sent_bytes for s in wide[1:])
    assert not stepping.same_bits(narrow[1][0].result, wide[1][0].result)
    torch.testing.assert_close(flat(narrow[1][0].result), flat(wide[1][0].result), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("algorithm", SPARSE)
def test_eight_bits_are_fewer_than_sixteen_and_lose_nothing(algorithm: str) -> None:
    """Rounding may swap winners that are nearly equal, so that only the laws and the bytes can be compared."""
    eight, sixteen = (
        run_steps(3, 4, algorithm=algorithm, warmup_steps=1, values=values) for values in ("e4m3", "fp16")
    )
    stepping.assert_laws(eight)
    assert not stepping.same_bits(eight[1][0].result, sixteen[1][0].result)
    less, more = (sum(step[1].event.wire.sent_bytes for step in steps[1:]) for steps in (eight, sixteen))
    assert less < more


@pytest.mark.parametrize("warmup", [0, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_gradients_count_as_zeros(layout: str, warmup: int) -> None:
    """Missing on some ranks, given as None, or missing on all of them: the result is there on all ranks."""

    def job(comm: oktopk.Communicator) -> dict[str, Tensor]:
        grads: dict[str, Tensor | None] = dict(gradients(comm.rank, 0))
        del grads["d"]
        if comm.rank == 0:
            grads["a"] = None
        if comm.rank == 1:
            del grads["c"]
        with stepping.reducer_on(comm, buckets=LAYOUTS[layout], warmup_steps=warmup, density=1.0) as reducer:
            return reducer.sync(grads)

    results = stepping.on_ranks(3, job)
    given = {"a": (1, 2), "b": (0, 1, 2), "c": (0, 2), "d": ()}
    for result in results:
        assert {name: tuple(grad.shape) for name, grad in result.items()} == SHAPES
        for name, ranks in given.items():
            total = sum((gradients(rank, 0)[name] for rank in ranks), torch.zeros(SHAPES[name]))
            torch.testing.assert_close(result[name], total / 3)


def test_gradients_are_replaced_in_place() -> None:
    def job(comm: oktopk.Communicator) -> None:
        grads = gradients(comm.rank, 0)
        grads["a"] = grads["a"].t().contiguous().t()  # not contiguous
        with stepping.reducer_on(comm) as reducer:
            result = reducer.sync(grads)
        assert all(result[name] is grads[name] for name in grads)
        torch.testing.assert_close(grads["a"], mean_gradient(2, 0)["a"])

    stepping.on_ranks(2, job)


def test_unknown_names_are_an_error() -> None:
    with stepping.reducer_on(None) as reducer, pytest.raises(ValueError, match="unknown parameter 'x'"):
        reducer.sync({"x": torch.ones(1)})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.5}, r"density must be in \(0, 1\]"),
        ({"density": "1 %"}, r"density must be in \(0, 1\]"),
        ({"density": True}, r"density must be in \(0, 1\]"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0, got -1"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer"),
        ({"ramp_steps": -2}, "ramp_steps must be an integer"),
        ({"max_skipped": 0}, "max_skipped must be an integer of at least 1, got 0"),
        ({"dense_below": -1}, "dense_below must be an integer"),
        ({"values": "fp8"}, "unknown value format 'fp8': choose from fp32"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"norm_clip": 0.0}, "norm_clip must be above 0, got 0.0; leave it out"),
        ({"norm_clip": math.nan}, "norm_clip must be above 0"),
        ({"dense": "*.bias"}, r"dense must be a list of patterns"),
        ({"dense": 3}, r"dense must be a list of patterns"),
        ({"momentum": "much"}, r"momentum must be in \[0, 1\), got 'much'"),
        ({"auto": "maybe"}, "auto must be True or False, got 'maybe'"),
        ({"algorithm": "topk"}, "unknown algorithm 'topk': did you mean 'topka'"),
        ({"buckets": "layer"}, 'buckets must be "model", a size in MB or lists of names'),
        ({"buckets": [["a", "b"], ["c"]]}, "every parameter exactly once; check d"),
        ({"buckets": [["a", "b", "a"], ["c", "d"]]}, "every parameter exactly once; check a"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepping.reducer_on(None, **wrong)


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="unknown option 'warmup': did you mean 'warmup_steps'"):
        stepping.reducer_on(None, warmup=3)


def test_ranks_that_disagree_are_told_so() -> None:
    def job(comm: oktopk.Communicator) -> None:
        with stepping.reducer_on(comm, density=0.01 * (1 + comm.rank)) as reducer:
            reducer.sync(gradients(comm.rank, 0))

    with pytest.raises(ValueError, match="ranks disagree on density"):
        stepping.on_ranks(2, job)
