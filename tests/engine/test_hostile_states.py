"""A checkpoint, or a state that a user passes back, is checked in full before any of it is used."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import oktopk
from oktopk.algorithms.oktopk import GlobalThreshold, OkTopkTracking
from oktopk.algorithms.selection import Tracker
from oktopk.engine.density.model import Course
from oktopk.wire.sparse_vector import SparseVector
from tests.support import stepping
from tests.support.stepping import SHAPES, State, on_ranks, record_steps, reducer_on

Spoil = Callable[[State], None]


def saved(algorithm: str = "oktopk", world: int = 1) -> list[State]:
    def job(comm: oktopk.Communicator) -> State:
        with reducer_on(comm, algorithm, warmup_steps=0, momentum=0.5, buckets=stepping.SEVERAL) as reducer:
            record_steps(reducer, comm.rank, range(3))
            return reducer.state_dict()

    return on_ranks(world, job)


def put(*path: Any, value: Any) -> Spoil:
    """What replaces one leaf of a state by `value`."""

    def spoil(state: State) -> None:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return spoil


def track(*path: str, value: Any) -> Spoil:
    """The same in what the algorithm remembers of the first group."""
    return put("groups", 0, "tracking", *path, value=value)


def edges(*values: Any) -> Spoil:
    return track("edges", value=values)


def memory(name: str, value: Any) -> Spoil:
    return put(name, "c", value=value)


INFINITE = {"fixed": 0.0, "slope": math.inf, "base": 1.0}


def course(**changes: Any) -> dict[str, Any]:
    """Where a density by measurement has got to."""
    return {**asdict(Course(0, 0.04)), **changes}


C = 200  # entries of the first bucket, "c", and of its group
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "edges that do not begin at 0": (edges(-5000, C), "rise from 0 to 200"),
    "edges that begin inside": (edges(100, C), "rise from 0 to 200"),
    "edges that fall": (edges(0, 150, 20, C), "rise from 0 to 200"),
    "edges beyond the end": (edges(0, 10**9, C), "rise from 0 to 200"),
    "edges that are no integers": (edges(0.0, C), "rise from 0 to 200"),
    "edges of another size": (edges(0, 7), "from a tensor of 7 entries, this one has 200"),
    "a local threshold of NaN": (track("local", "threshold", value=math.nan), "local threshold"),
    "a negative threshold": (track("local", "threshold", value=-1.0), "local threshold"),
    "a negative count": (track("local", "count", value=-1), "local threshold"),
    "a slope of 0": (track("local", "slope", value=0.0), "local threshold"),
    "an age that is no integer": (track("local", "age", value="1"), "local threshold"),
    "an infinite global threshold": (track("overall", "value", value=math.inf), "global threshold"),
    "a global age of -1": (track("overall", "age", value=-1), "global threshold"),
    "steps of -1": (track("steps", value=-1), "steps must be"),
    "a bucket counted from the end": (put("groups", 0, "buckets", value=[-1]), "its groups name the buckets"),
    "a bucket in two groups": (put("groups", 0, "buckets", value=[1]), "its groups name the buckets"),
    "a group without buckets": (put("groups", 0, "buckets", value=[]), "a group without buckets"),
    "a residual of one entry": (memory("residuals", torch.tensor([7.0])), "have 1 entries, the parameter 200"),
    "more entries than there are": (track("local", "count", value=C + 1), "local threshold"),
    "a count of 400 digits": (track("local", "count", value=10**400), "local threshold"),
    "an age of 400 digits": (track("local", "age", value=10**400), "local threshold"),
    "steps of 400 digits": (track("steps", value=10**400), "steps must be"),
    "a step of 65 bits": (put("step", value=2**64), "step must be an integer from 0"),
    "a residual that float32 cannot hold": (
        memory("residuals", torch.full((C,), 1e300, dtype=torch.float64)), "of c are not finite"
    ),
    "a velocity that float32 cannot hold": (
        memory("velocities", torch.full((C,), 1e300, dtype=torch.float64)), "of c are not finite"
    ),
    "a residual of 8 bits": (memory("residuals", torch.zeros(C).to(torch.float8_e4m3fn)), "16 bits or more"),
    "a residual without data": (memory("residuals", torch.zeros(C, device="meta")), "the meta device"),
    "a residual of a number": (put("residuals", 5, value=torch.zeros(C)), "the residuals have the name 5"),
    "times of 400 digits": (put("autotune", "seconds", value=[10**400, 1]), "step times must be finite"),
    "a residual of NaN": (memory("residuals", torch.full((C,), math.nan)), "of c are not finite"),
    "a residual of integers": (memory("residuals", torch.ones(C, dtype=torch.int64)), "floating-point"),
    "a residual that is a list": (memory("residuals", [0.0] * C), "floating-point"),
    "a sparse residual": (memory("residuals", torch.zeros(C).to_sparse()), "floating-point"),
    "a velocity of one entry": (memory("velocities", torch.tensor([7.0])), "of c have 1 entries"),
    "an infinite velocity": (memory("velocities", torch.full((C,), math.inf)), "of c are not finite"),
    "a negative step": (put("step", value=-1), "step must be an integer from 0"),
    "a step that is a text": (put("step", value="3"), "step must be an integer from 0"),
    "a re-test that never comes": (put("autotune", "retest", value=2**40), "the first re-test must be in"),
    "times of NaN": (put("autotune", "seconds", value=[math.nan, 1.0]), "step times must be finite"),
    "a schedule that falls": (put("schedule", value=[[3, 0.1], [2, 0.2]]), "steps that rise"),
    "a schedule of more than all": (put("schedule", value=[[0, 7.0]]), "densities in (0, 1]"),
    "a course of NaN": (put("autotune", "density", value=course(density=math.nan)), "density must be in (0, 1]"),
    "a course that never ends": (put("autotune", "density", value=course(start=-1)), "integers from 0"),
    "infinite costs": (put("autotune", "density", value=course(costs=INFINITE)), "costs must be finite"),
    "a negative bucket size": (put("buckets", 0, "sizes", value=[-200]), "a bucket of"),
    "sizes for other names": (put("buckets", 0, "sizes", value=[100, 100]), "a bucket of"),
    "a parameter in two buckets": (put("buckets", 1, "names", value=["c", "d"]), "every parameter once"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_checkpoint_is_one_error_and_changes_nothing(what: str) -> None:
    (state,) = saved()
    spoil, message = HOSTILE[what]
    hostile = copy.deepcopy(state)
    spoil(hostile)
    with reducer_on(None, warmup_steps=0, momentum=0.5, buckets=stepping.SEVERAL) as reducer:
        record_steps(reducer, 7, range(2))
        before = reducer.state_dict()
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            reducer.load_state_dict(hostile)
        assert "\n" not in str(caught.value)
        stepping.assert_same_state(before, reducer.state_dict())
        reducer.load_state_dict(state)
        stepping.assert_same_state(state, reducer.state_dict())


def test_a_residual_is_compared_with_the_parameter_without_buckets_too() -> None:
    """A checkpoint that says nothing of buckets hides no residual of another size."""
    (state,) = saved()
    state |= {"buckets": [], "groups": [], "residuals": {"c": torch.tensor([7.0])}}
    with reducer_on(None) as reducer, pytest.raises(ValueError, match="have 1 entries, the parameter 200"):
        reducer.load_state_dict(state)


def test_an_optimizer_changes_as_a_whole_or_not_at_all() -> None:
    """Neither the inner optimizer nor the residuals take over their part if the other's does not fit."""
    parameter = torch.nn.Parameter(torch.zeros(100, 100))
    inner = torch.optim.SGD([parameter], lr=0.1)
    with oktopk.DistributedOptimizer(inner, [("w", parameter)], warmup_steps=0, auto=False) as optimizer:
        (parameter * torch.arange(100.0)).sum().backward()
        optimizer.step()
        good = copy.deepcopy(optimizer.state_dict())
        worse = copy.deepcopy(good)
        worse["param_groups"][0]["lr"] = 99.0
        worse["oktopk"]["residuals"]["w"][0] = math.nan
        with pytest.raises(ValueError, match="not finite"):
            optimizer.load_state_dict(worse)
        assert inner.param_groups[0]["lr"] == 0.1
        other = copy.deepcopy(good)
        other["param_groups"].append(other["param_groups"][0])
        other["oktopk"]["residuals"]["w"] += 1
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(other)
        stepping.assert_same_state(good["oktopk"], optimizer.state_dict()["oktopk"])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (memory("residuals", torch.tensor([7.0])), "residuals of c have 1 entries"),
        (memory("velocities", torch.full((C,), math.nan)), "not finite"),
        (put("world", value=-2), "must be integers from 0"),
        (put("format", value=1), "saved by oktopk 0.1"),
        (put("ranks_per_host", value=5), "ranks_per_host=5 of 2 ranks"),
        (put("buckets", value=None), "not a state_dict"),
    ],
)
def test_redistribute_checks_every_state(what: Spoil, message: str) -> None:
    states = saved(world=2)
    what(states[0])
    if "ranks_per_host" in message:
        what(states[1])
    with pytest.raises(ValueError, match=message):
        oktopk.redistribute(states, 0, 3)


def test_redistribute_refuses_a_rank_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="rank must be one of 0 to world - 1, got rank 3 of 3"):
        oktopk.redistribute(saved(world=2), 3, 3)


GOOD = OkTopkTracking(Tracker(0.5, 10), GlobalThreshold(0.5), (0, 40, 100), 3)
WRONG_STATES = {
    "edges": replace(GOOD, edges=(-40, 100)),
    "local": replace(GOOD, local=Tracker(math.nan, 1)),
    "overall": replace(GOOD, overall=GlobalThreshold(-1.0)),
    "steps": replace(GOOD, steps=-1),
    "local type": replace(GOOD, local=(0.5, 10)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG_STATES)
def test_a_state_that_cannot_be_right_is_refused_by_the_collective(what: str) -> None:
    with pytest.raises(ValueError, match=r"edges of regions|threshold is out of range|steps must be"):
        oktopk.sparse_allreduce(torch.ones(100), state=WRONG_STATES[what])
    assert GOOD.problem(100) is None


@pytest.mark.parametrize("hint", [math.nan, math.inf, -1.0])
def test_a_hint_that_is_no_threshold_is_refused(hint: float) -> None:
    with pytest.raises(ValueError, match="finite threshold"):
        oktopk.sparse_allreduce(torch.ones(100), algorithm="topka", state=hint)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_vector_has_as_many_values_as_indices(length: int) -> None:
    vector = SparseVector(torch.tensor([1, 4], dtype=torch.int32), torch.ones(2), 6)
    with pytest.raises(ValueError, match=f"{length} values for 2 indices"):
        vector.with_values(torch.ones(length))


def test_the_states_that_are_spoilt_here_are_good_ones() -> None:
    (state,) = saved()
    assert state["residuals"].keys() == SHAPES.keys()
    assert [group["buckets"] for group in state["groups"]] == [[0], [1], [2]]
    assert state["buckets"][0] == {"names": ["c"], "sizes": [C]}


def test_ranks_that_resume_with_other_decisions_say_so_at_once() -> None:
    """One goes on dense, the other one sparse: their next messages would not be each other's."""

    def rank(comm: oktopk.Communicator) -> str:
        with reducer_on(comm, auto=True, warmup_steps=0) as reducer:
            record_steps(reducer, comm.rank, range(1))
            state = reducer.state_dict()
        state["autotune"]["prefers_dense"], state["step"] = bool(comm.rank), 100
        with reducer_on(comm, auto=True, warmup_steps=0) as reducer:
            reducer.load_state_dict(state)
            with pytest.raises(ValueError, match="ranks disagree on density of the step") as caught:
                reducer.sync(stepping.gradients(comm.rank, 100))
            return str(caught.value)

    with pytest.raises(ValueError, match="ranks disagree"):
        on_ranks(2, rank, timeout=300.0)


def test_redistribute_does_not_count_to_the_number_of_ranks() -> None:
    (state,) = saved()
    with pytest.raises(ValueError, match="redistribute needs the states of all 4611686018427387904 ranks"):
        oktopk.redistribute([state | {"world": 2**62}], 0, 1)
