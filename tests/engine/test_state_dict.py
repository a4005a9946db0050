"""What a rank saves: plain data, enough to go on to the bit, and shared anew when the number of ranks changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oktopk
from oktopk.engine.bucket_state import BucketGroup
from tests.support import stepping
from tests.support.stepping import (
    LAYOUTS,
    SHAPES,
    State,
    flat,
    on_ranks,
    record_steps,
    reducer_on,
    same_bits,
    through_a_file,
)

ALGORITHMS = list(oktopk.ALGORITHMS)


def states_of(world: int, steps: int = 4, algorithm: str = "oktopk", **options: Any) -> list[State]:
    def job(comm: oktopk.Communicator) -> State:
        with reducer_on(comm, algorithm, warmup_steps=1, **options) as reducer:
            record_steps(reducer, comm.rank, range(steps))
            return reducer.state_dict()

    return on_ranks(world, job)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tensors_and_primitives_only(algorithm: str, layout: str) -> None:
    for state in states_of(2, 3, algorithm, buckets=LAYOUTS[layout], momentum=0.5):
        for leaf in stepping.leaves(state).values():
            assert leaf is None or type(leaf) in (int, float, str, bool, Tensor)
        stepping.assert_same_state(state, through_a_file(state))
        if algorithm != "dense":
            assert state["residuals"].keys() == SHAPES.keys()
        assert state["velocities"].keys() == SHAPES.keys()


@pytest.mark.parametrize(("saved_at", "momentum"), [(2, 0.0), (5, 0.5)], ids=["first sparse step", "later"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_gives_the_same_bits(algorithm: str, layout: str, saved_at: int, momentum: float) -> None:
    """Whatever buckets the new one was made with: it goes on in those of the checkpoint."""
    options: dict[str, Any] = {"momentum": momentum, "values": "bf16"}

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, algorithm, buckets=LAYOUTS[layout], **options) as whole:
            expected = record_steps(whole, comm.rank, range(8))
        with reducer_on(comm, algorithm, buckets=LAYOUTS[layout], **options) as first:
            record_steps(first, comm.rank, range(saved_at))
            state = through_a_file(first.state_dict())
        with reducer_on(comm, algorithm, buckets=[["d"], ["a", "b"], ["c"]], **options) as second:
            second.load_state_dict(state)
            assert second.step == saved_at
            resumed = record_steps(second, comm.rank, range(saved_at, 8))
        for one, other in zip(expected[saved_at:], resumed, strict=True):
            assert same_bits(one.result, other.result)
            stepping.assert_same_state(one.after, other.after)
            assert one.event.phase == other.event.phase

    on_ranks(2 if layout == "one bucket" else 3, job)


def test_a_saved_state_does_not_change_with_the_run() -> None:
    with reducer_on(None, warmup_steps=0) as reducer:
        record_steps(reducer, 0, range(2))
        state = reducer.state_dict()
        copy = through_a_file(state)
        record_steps(reducer, 0, range(2, 4))
        stepping.assert_same_state(state, copy)


FUSED: dict[str, Any] = {"warmup_steps": 1, "buckets": [["a"], ["b"], ["c"], ["d"]], "fusion_entries": 8}
"""Density 5 %: a and b send 6 entries, with c they send 16; d is left."""


@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_the_tracking_of_a_fused_group_survives_to_the_bit(algorithm: str) -> None:
    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, algorithm, **FUSED) as first:
            record_steps(first, comm.rank, range(4))
            before, saved = groups_of(first), first.state_dict()
            expected = record_steps(first, comm.rank, range(4, 6))
        with reducer_on(comm, algorithm, **FUSED) as second:
            second.load_state_dict(through_a_file(saved))
            assert groups_of(second) == [group for group in before if group[1] is not None]
            assert [names for names, _ in before] == [["a", "b", "c"], ["d"]]
            stepping.assert_same_state(saved, second.state_dict())
            for one, other in zip(expected, record_steps(second, comm.rank, range(4, 6)), strict=True):
                assert same_bits(one.result, other.result)
                stepping.assert_same_state(one.after, other.after)

    on_ranks(3, job)


def groups_of(reducer: oktopk.AllReducer) -> list[tuple[list[str], Any]]:
    """Of each group the names of its parameters, and what the algorithm remembers of it."""
    groups = reducer._engine._steps.buckets.groups.values()
    assert all(type(group) is BucketGroup for group in groups)
    return [
        (
            [name for state in group.members for name in state.bucket.names],
            None if group.tracking is None else reducer._engine.settings.algorithm.pack_state(group.tracking),
        )
        for group in groups
    ]


def test_a_fused_group_is_one_reduction_with_one_k() -> None:
    size, k = 91 + 31 + 200, int((91 + 31 + 200) * 0.05)
    (*_, step) = stepping.run_steps(2, 3, **FUSED)
    for record in step:
        assert [(part.bucket, part.volume.size) for part in record.event.reductions] == [(0, size), (3, 3)]
        assert [part.target_count for part in record.event.reductions] == [k, 1]
        assert [group["buckets"] for group in record.after["groups"]] == [[0, 1, 2], [3]]


# Another number of ranks.


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1), (1, 2), (3, 3)])
def test_a_changed_world_keeps_the_mass(before: int, after: int) -> None:
    """Σe'/P' = Σe/P, and the new ranks go on by the laws."""
    states = [through_a_file(state) for state in states_of(before, momentum=0.5, buckets=stepping.SEVERAL)]
    shared = [oktopk.redistribute(iter(reversed(states)), rank, after) for rank in range(after)]
    for memory in ("residuals", "velocities"):
        old = torch.stack([flat(state[memory]) for state in states]).sum(0) / before
        new = torch.stack([flat(state[memory]) for state in shared]).sum(0) / after
        assert old.any()
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-7)

    def job(comm: oktopk.Communicator) -> list[stepping.Record]:
        with reducer_on(comm) as reducer:
            reducer.load_state_dict(through_a_file(shared[comm.rank]))
            assert reducer.step == 4
            return record_steps(reducer, comm.rank, range(4, 7))

    stepping.assert_laws(list(step) for step in zip(*on_ranks(after, job), strict=True))


def test_incomplete_or_mixed_states_are_refused() -> None:
    states, later, others = states_of(3), states_of(3, 5), states_of(3, buckets=stepping.SEVERAL)
    for wrong, message in (
        ([], "needs the states of all ranks"),
        (states[:2], r"all 3 ranks, got those of \[0, 1\]"),
        ([*states[:2], later[2]], "not of one run: rank 2 of 3 at step 5, rank 0 of 3 at step 4"),
        ([*states[:2], states_of(2)[1]], "not of one run"),
        ([*states[:2], others[2]], "not of one run: rank 2 has other buckets"),
        ([*states, states[1]], "the state of rank 1 twice"),
    ):
        with pytest.raises(ValueError, match=message):
            oktopk.redistribute(wrong, 0, 2)


# States that do not fit.


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    states = states_of(2)
    foreign = states_of(3)[0]
    garbled = {**states[0], "buckets": [{**states[0]["buckets"][0], "names": ["a", "b", "c", "x"]}]}
    resized = {**states[0], "buckets": [{**states[0]["buckets"][0], "sizes": [90, 31, 200, 3]}]}
    incomplete = {key: value for key, value in states[0].items() if key != "residuals"}
    cases = [
        (states[1], "this is the state of rank 1, loaded on rank 0"),
        (foreign, r"saved by 3 ranks, now there are 2: .* oktopk.redistribute"),
        ({**states[0], "format": 99}, "has format 99, this version of oktopk reads 2"),
        ({**states[0], "format": 1}, "saved by oktopk 0.1, which this version cannot read: load only the model"),
        ({**states[0], "groups": [{"buckets": [7], "tracking": None}]}, r"its groups name the buckets \[7\] of 1"),
        ({**states[0], "autotune": None}, "this is not a state_dict of oktopk"),
        (garbled, "checkpoint does not match the model: only in the checkpoint: x; only in the model: d"),
        (resized, "checkpoint does not match the model: size mismatch: a"),
        (incomplete, "this is not a state_dict of oktopk: KeyError"),
        ({}, "this is not a state_dict of oktopk"),
        ({**states[0], "buckets": None}, "this is not a state_dict of oktopk"),
    ]

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm) as reducer:
            record_steps(reducer, comm.rank, range(3))
            before, buckets = reducer.state_dict(), reducer.buckets
            for state, message in cases if comm.rank == 0 else ():
                with pytest.raises(ValueError, match=message):
                    reducer.load_state_dict(state)
                stepping.assert_same_state(before, reducer.state_dict())
                assert reducer.buckets == buckets
            record_steps(reducer, comm.rank, range(3, 5))

    on_ranks(2, job)


def test_a_model_with_another_parameter_is_refused() -> None:
    (state,) = states_of(1)
    more = {**stepping.parameters(), "e": nn.Parameter(torch.zeros(2))}
    with (
        oktopk.AllReducer(more.items()) as reducer,
        pytest.raises(ValueError, match="does not match the model: only in the model: e"),
    ):
        reducer.load_state_dict(state)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("oktopk", "topka"), ("gtopk", "oktopk"), ("topka", "dense")])
def test_residuals_go_on_under_another_algorithm(
    saved_by: str, loaded_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = states_of(2, algorithm=saved_by)

    def job(comm: oktopk.Communicator) -> list[stepping.Record]:
        with reducer_on(comm, loaded_by) as reducer:
            reducer.load_state_dict(states[comm.rank])
            assert same_bits(reducer.state_dict()["residuals"], states[comm.rank]["residuals"])
            return record_steps(reducer, comm.rank, range(4, 7))

    with caplog.at_level(logging.WARNING, logger="oktopk"):
        steps = [list(step) for step in zip(*on_ranks(2, job), strict=True)]
    stepping.assert_laws(steps)
    warnings = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert len(warnings) == 2  # one per rank
    assert "its residuals are kept, its thresholds are not" in warnings[0]
