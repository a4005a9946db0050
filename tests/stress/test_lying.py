"""Reductions with a lying rank, a short run; `make fuzz` is the long one. And that it would notice."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import oktopk
from oktopk import collective
from oktopk.comm import broadcast
from oktopk.engine import step as engine_step
from oktopk.errors import CommTimeout, WireError
from oktopk.wire import sparse_vector
from stress.fuzz import lies, lying
from stress.fuzz.lying import LawBroken, Liar, Report, case, outcome
from stress.fuzz.run import LYING_WORKER, judge_all
from tests.support import stepping

CASES, CHECKED_CASES = 400, 80


def test_a_lying_rank_neither_crashes_nor_divides_the_others() -> None:
    tally = judge_all(0, CASES, command=LYING_WORKER)
    assert tally.failures == []
    assert tally.cases == CASES
    assert tally.operations > 1.3 * CASES  # a full run has 200,000
    for found in lying.OUTCOMES:
        assert sum(n for (_, one), n in tally.counts.items() if one == found) >= CASES // 40, found
    assert {kind.split(":")[0] for kind, _ in tally.counts} == {*lying.SPARSE_PHASES}


def test_it_makes_no_kernel_leave_its_arrays(pytestconfig: pytest.Config) -> None:
    """Numba's own bounds checks are on, in kernels that are compiled for it and kept apart."""
    assert pytestconfig.cache is not None
    kept = str(pytestconfig.cache.mkdir("checked-kernels"))
    checked = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": kept}
    tally = judge_all(10**6, 10**6 + CHECKED_CASES, checked, LYING_WORKER)
    assert tally.failures == []
    assert tally.cases == CHECKED_CASES


def test_a_case_has_a_number() -> None:
    assert [case(number) for number in range(200)] == [case(number) for number in range(200)]


# Different things told to different ranks.


class Equivocates(Liar):
    """Tells the rank before it another result than the others."""

    def post_send(self, message: torch.Tensor, peer: int, operation: Any) -> Any:
        if lies.is_sparse(message) and operation.phase == "gather" and peer == (self.rank - 1) % self.world:
            message = lies.lie_about(message, lies.Lie(lies.VALUES, 1, own_only=True), self.rank)
        return self.inner.post_send(message, peer, operation)


def test_different_results_are_found_before_anything_is_applied() -> None:
    """By every honest rank; and its residuals are what they were, with the gradient."""

    def job(comm: oktopk.Communicator) -> None:
        comm.fail = lambda error: None  # type: ignore[method-assign]  # every rank finds out by itself
        comm = Equivocates(comm, case(0)) if comm.rank == 1 else comm
        with stepping.reducer_on(comm, "topka", warmup_steps=0) as reducer:
            grads = stepping.gradients(comm.rank, 0)
            with pytest.raises(WireError, match="differ in the results of the step"):
                reducer.sync({name: grad.clone() for name, grad in grads.items()})
            kept = reducer._engine._steps.reducer.residuals.state_dict()
            torch.testing.assert_close(stepping.flat(kept), stepping.flat(grads))

    oktopk.run_threads(4, job, timeout=20)


def test_the_collective_restores_the_residual() -> None:
    restored = {}

    def job(comm: oktopk.Communicator) -> None:
        comm = Equivocates(comm, case(0)) if comm.rank == 1 else comm
        residual = torch.full((100,), 0.5)
        try:
            oktopk.sparse_allreduce(torch.arange(100.0), 0.1, "oktopk", residual, comm)
        finally:
            restored[comm.rank] = bool(residual.eq(0.5).all())

    with pytest.raises(WireError, match="told others different things"):
        oktopk.run_threads(3, job, timeout=20)
    assert restored == {0: True, 1: True, 2: True}


def test_a_false_value_told_to_all_is_a_gradient() -> None:
    """The result is what follows from the messages as they were sent."""
    made = next(
        one
        for one in map(case, range(10**6))
        if one.algorithm == "topka" and one.lie.kind == lies.VALUES and not one.told_once and one.hides
        and one.values == "fp32" and not one.engine and one.step == 0
    )  # fmt: skip
    reports, liar = lying.run(made, lying.PATIENT)
    assert lying.judge(made, reports, liar) == lying.SAME
    honest = [report.steps[0][0] for rank, report in enumerate(reports) if rank != made.liar]
    assert honest[0] != reports[made.liar].steps[0][0]


# It would notice.


def test_results_that_are_not_compared_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collective, engine_step):
        monkeypatch.setattr(module, "post_digest", lambda *arguments: lambda: None)
    with pytest.raises(LawBroken, match="honest ranks"):
        all(outcome(case(number)) for number in range(400))


def test_only_what_a_timeout_explains_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that depends on a race must not pass because the second run has none."""
    made = replace(case(0), steps=1)
    liar = Liar(oktopk.comm.alone(), made)
    fine = [Report(steps=[(b"same", None)]) for _ in range(made.world)]
    diverged = [Report(steps=[(bytes([rank]), None)]) for rank in range(made.world)]
    late = [Report(error=CommTimeout("no answer"), steps=[]) for _ in range(made.world)]
    refused = [Report(error=WireError("without a lie"), steps=[]) for _ in range(made.world)]

    def outcome_of(*runs: list[Report]) -> str:
        left = iter(runs)
        monkeypatch.setattr(lying, "run", lambda *arguments: (next(left), liar))
        return outcome(made)

    assert outcome_of(late, fine) == lying.UNTOLD
    for first in (diverged, refused):
        with pytest.raises(LawBroken):
            outcome_of(first, fine)
    with pytest.raises(LawBroken, match="differs between honest ranks"):
        outcome_of(late, diverged)


def test_initial_parameters_that_are_not_compared_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "post_digest", lambda *arguments: lambda: None)
    broadcasts = [made for made in map(case, range(3000)) if made.phase == lying.START]
    with pytest.raises(LawBroken, match="initial parameters differ between honest ranks"):
        all(map(outcome, broadcasts))


def test_parts_that_are_joined_unseen_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels refuse them, but then nobody knows who sent them."""
    monkeypatch.setattr(sparse_vector, "_check_order", lambda parts: None)
    balanced = [
        made
        for made in map(case, range(20_000))
        if (made.phase, made.lie.kind, made.hides) == ("gather", lies.PLACES, True)
        and ("imbalance", 1.0) in made.settings and not made.told_once
    ]  # fmt: skip
    with pytest.raises(LawBroken, match="not an error of the library"):
        all(map(outcome, balanced))
