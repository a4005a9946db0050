"""Item 9: what a run will do, said before it begins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.engine.autotune import plan_warmup
from oktopk.train.config.origins import resolve
from oktopk.train.config.plan import Plan


def plan(**changes: Any) -> Plan:
    values = {
        "steps_per_epoch": 14,
        "max_epochs": 10,
        "max_steps": None,
        "warmup_steps": 128,
        "algorithm": "oktopk",
        "density": 0.01,
        "parameters": 27_569_568,
        "world": 8,
    }
    return Plan(**{**values, **changes})


SENTENCES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "140 steps: 128 dense warm-up, 12 sparse; sparse starts in epoch 9"),
    ({"max_epochs": 2}, "28 steps: all dense warm-up, 0 sparse"),
    ({"algorithm": "dense"}, "140 steps, all dense"),
    ({"max_steps": 130}, "130 steps: 128 dense warm-up, 2 sparse; sparse starts in epoch 9"),
    ({"max_steps": 128}, "128 steps: all dense warm-up, 0 sparse"),
    ({"max_steps": 1000}, "140 steps: 128 dense warm-up, 12 sparse; sparse starts in epoch 9"),
    ({"warmup_steps": 0}, "140 steps: 0 dense warm-up, 140 sparse; sparse starts in epoch 0"),
    ({"warmup_steps": 14}, "140 steps: 14 dense warm-up, 126 sparse; sparse starts in epoch 1"),
    ({"warmup_steps": 13}, "140 steps: 13 dense warm-up, 127 sparse; sparse starts in epoch 0"),
)


@pytest.mark.parametrize(("changes", "sentence"), SENTENCES)
def test_item_9_the_plan_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    made = plan(**changes)
    assert made.sentence() == sentence
    assert (made.warning() is not None) == sentence.endswith(" 0 sparse")


def test_item_9_a_run_that_never_becomes_sparse_is_warned_about() -> None:
    text = plan(max_epochs=2).warning()
    assert text is not None
    for words in ("never reaches the sparse phase", "28 steps", "first 128", "--warmup-steps below 28"):
        assert words in text


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.none() | st.integers(1, 3000),
    st.integers(0, 3000),
    st.sampled_from(["dense", "oktopk", "topka"]),
)
def test_item_9_every_step_is_dense_or_sparse(
    steps: int, epochs: int, most: int | None, warmup: int, algorithm: str
) -> None:
    made = plan(steps_per_epoch=steps, max_epochs=epochs, max_steps=most, warmup_steps=warmup, algorithm=algorithm)
    sparse = [step for step in range(made.steps) if algorithm != "dense" and step >= warmup]
    assert made.steps == min(steps * epochs, most or steps * epochs)
    assert made.sparse_steps == len(sparse)
    assert made.dense_steps + made.sparse_steps == made.steps
    assert made.first_sparse_epoch == (sparse[0] // steps if sparse else None)
    assert made.epochs == (made.steps - 1) // steps + 1
    assert (made.warning() is not None) == (algorithm != "dense" and not sparse)


def test_item_1_bytes_of_a_step() -> None:
    dense, sparse = plan().volume()
    assert dense == "a dense step: 110,278,272 bytes of gradient; a rank sends 192,986,976 (ring)"
    assert "density 0.01: 2,205,568 bytes for 275,696 entries" in sparse
    assert "less than 5,789,616 on average" in sparse
    assert len(plan(algorithm="dense").volume()) == 1


def test_one_rank_alone_has_no_bound_to_keep() -> None:
    dense, sparse, alone = plan(world=1).volume()
    assert dense == "a dense step: 110,278,272 bytes of gradient; a single rank sends nothing"
    assert sparse == "a sparse step at density 0.01: 2,205,568 bytes for 275,696 entries"
    assert "one rank: there is nothing to exchange and nothing to compress" in alone
    assert len(plan(world=1, algorithm="dense").volume()) == 1
    assert not any("one rank" in line for line in plan(world=2).volume())


def test_a_dense_step_sends_what_a_ring_sends() -> None:
    assert plan(world=2, parameters=1000).dense_bytes == 4000
    assert plan(world=8, parameters=1000, ranks_per_host=4).dense_bytes == 4000
    assert plan(world=1).dense_bytes == 0


def test_a_ramp_is_told() -> None:
    told = "the density falls from 0.25 over the first 50 sparse steps"
    assert plan(ramp_steps=50).volume()[-1] == told
    assert told not in plan(ramp_steps=50, density=0.3).volume() + plan(ramp_steps=50, algorithm="dense").volume()


def test_a_density_by_measurement_is_told() -> None:
    dense, sparse, told = plan(density="auto", budget=0.2).volume()
    assert "density 0.01: 2,205,568 bytes" in sparse
    assert told == "sparse steps have a density of 0.01 to 0.25 by measurement (budget: 20 % of a step)"
    assert "half of that" not in dense
    assert plan(density="auto").sentence() == plan().sentence()


def test_a_schedule_is_counted_step_by_step() -> None:
    """A run that is repeated may have dense steps among the sparse ones."""
    made = plan(density="0:dense,128:0.01,131:dense,135:0.04")
    assert made.sentence() == "140 steps: 132 dense warm-up, 8 sparse; sparse starts in epoch 9"
    assert made.volume()[-1] == "sparse steps have the densities of a schedule, 0.01 to 0.04"
    assert plan(density="0:dense,150:0.01").warning() is not None


def test_a_warm_up_in_16_bits_is_told() -> None:
    first = plan(warmup_values="bf16").volume()[0]
    assert first.endswith("a rank sends 192,986,976 (ring), half of that in bf16 during the warm-up")


@pytest.mark.parametrize("steps", [30, 500, 100_000])
def test_a_warm_up_by_the_length_of_the_run_is_a_number_in_the_plan(steps: int) -> None:
    """The plan says what the engine does: the same rule."""
    config = resolve({"warmup_steps": "auto", "max_epochs": "9", "max_steps": str(steps)}, {}).config
    made = Plan.of(config, 10**6, 1000, world=2)
    assert (made.warmup_steps, made.ramp_steps) == plan_warmup(steps)
    assert made.sparse_steps == steps - plan_warmup(steps)[0]
    given = resolve({"max_epochs": "9", "max_steps": str(steps)}, {}).config
    assert (Plan.of(given, 10**6, 1000, 2).warmup_steps, Plan.of(given, 10**6, 1000, 2).ramp_steps) == (128, 0)
