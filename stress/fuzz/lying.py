"""Whole reductions of 3 to 5 ranks, one of which lies in messages that pass `decode`; and what must come of it.

The law: every honest rank gets the same bits, or an error of the library.
A lie about the structure (another step or region, too many entries): an error that names the liar.
Two honest ranks that were told different results: an error on every honest rank, before anything is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import oktopk
from oktopk.comm import Operation, Pending, Wrapped
from oktopk.errors import CommTimeout, OkTopkError
from stress.fuzz.lies import CONTROL, HEADER, KINDS, TWIN, VALUES, Lie, in_the_name_of, lie_about

SPARSE_PHASES = {
    "oktopk": ("split", "balance", "gather", "gather"), "topka": ("gather",), "gaussiank": ("gather",),
    "topkdsa": ("split", "gather"), "gtopk": ("tree", "broadcast"),
}  # fmt: skip
CONTROL_PHASES = {"oktopk": ("regions", "counts", "counts", "exact counts", "magnitudes", "histogram")}
START = "start"
"""The broadcast of the initial parameters."""
RESULT_PHASES = ("gather", "broadcast")
"""The messages that make the result, and go to all ranks."""
TWIN_SIZE = 20_000
"""Long messages: short ones have no room for a twin."""
IMPATIENT, PATIENT = 2.0, 20.0
SAME, NAMED, FOUND, UNTOLD = "the same on all", "an error that names it", "an error", "the lie was not told"
OUTCOMES = (SAME, NAMED, FOUND, UNTOLD)


class LawBroken(AssertionError):
    """Honest ranks differ, or an error is not the right one."""


class Disturbed(LawBroken):
    """An error is not the right one, but some rank has timed out: on a busy machine that proves nothing."""


@dataclass(frozen=True)
class Case:
    """One job with one lie. `told_once`: to one rank only, or passed on by the liar only."""

    number: int
    world: int
    algorithm: str
    settings: tuple[tuple[str, float], ...]
    size: int
    density: float
    values: str
    steps: int
    engine: bool
    residual: bool
    liar: int
    phase: str
    step: int
    told_once: bool
    place: int
    lie: Lie
    hides: bool
    """Whether the liar answers every rank with that rank's own digest."""
    momentum: float
    """Of the engine, as the next."""
    dense_below: int

    @property
    def kind(self) -> str:
        return f"{self.algorithm}: {self.lie.kind}"


def case(number: int) -> Case:
    """The case of a number, always the same."""
    chance = Random(number)
    algorithm = chance.choice(("oktopk", "oktopk", "oktopk", *SPARSE_PHASES))
    world, steps, engine = chance.choice((3, 3, 4, 5)), chance.choice((1, 2, 2, 3)), chance.random() < 0.2
    control = chance.random() < (0.4 if algorithm == "oktopk" else 0.15)
    common = ("digest", START, START) if engine else ("digest", "agreement")
    phases = (*CONTROL_PHASES.get(algorithm, ()), *common) if control else SPARSE_PHASES[algorithm]
    told_once = chance.random() < 0.5
    settings = ()
    if algorithm == "oktopk":
        settings = (("imbalance", chance.choice((1.0, 2.0))), ("tau_prime", chance.choice((1, 32))))
    phase, kind = chance.choice(phases), CONTROL if control else chance.choice(KINDS)
    liar, step = chance.randrange(world), chance.randrange(steps)
    if phase == START:  # before the first step; most ranks send nothing then
        liar, step = chance.randrange(2), 0
    size = TWIN_SIZE if kind == TWIN else chance.choice((12, 60, 200, 1500, 20_000 if control else 200))
    return Case(
        number, world, algorithm, settings, size,
        chance.choice((0.05, 0.1, 0.3)), chance.choice(("fp32", "fp32", "fp16", "bf16", "e4m3")), steps, engine,
        chance.random() < 0.7, liar, phase, step, told_once,
        chance.randrange(2 if told_once else 1),
        Lie(kind, chance.randrange(2**32), own_only=not told_once),
        chance.random() < 0.7, chance.choice((0.0, 0.9)), chance.choice((0, size // 3)),
    )  # fmt: skip


class _Ignored:
    """The digest of another rank: the liar takes it for its own."""

    def __init__(self, arriving: Pending, liar: Liar, peer: int) -> None:
        self._arriving, self._liar, self._peer = arriving, liar, peer

    def wait(self, deadline: float) -> Tensor:
        self._arriving.wait(deadline)
        return in_the_name_of(self._peer, self._liar._digest)


class Liar(Wrapped):
    """The rank that lies: in one phase of one step, to one rank or to all of them."""

    def __init__(self, inner: oktopk.Communicator, lies: Case) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers = inner, inner.numbers
        self.case = lies
        self.step = 0
        self.told: list[int] = []
        """The ranks that were told something false."""
        self._place = 0
        self._digest = torch.empty(0)

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        told, case = message, self.case
        if self._hides_in(operation):
            self._digest = message
            return self.inner.post_send(self._echo(peer, operation), peer, operation)
        if (operation.phase, self.step) == (case.phase, case.step):
            if not case.told_once or self._place == case.place:
                told = lie_about(message, case.lie, self.rank)
            self._place += 1
        if not torch.equal(told, message):
            self.told.append(peer)
        return self.inner.post_send(told, peer, operation)

    def _echo(self, peer: int, operation: Operation) -> Tensor:
        """The message that the peer has sent, in this rank's name; the peer sends before it reads."""
        shared = self.inner._shared  # type: ignore[attr-defined]
        box = shared.boxes[self.rank]
        with box.changed:
            arrived = box.changed.wait_for(lambda: box.queue(peer, operation) or shared.failed, self.timeout)
            shared.check(operation)
            if not arrived:
                raise CommTimeout(f"{operation}: no digest to repeat within {self.timeout} s")
            return in_the_name_of(self.rank, box.queue(peer, operation)[0])

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        arriving = self.inner.post_recv(capacity, peer, operation)
        return _Ignored(arriving, self, peer) if self._hides_in(operation) else arriving

    def _hides_in(self, operation: Operation) -> bool:
        return operation.phase == "digest" and self.case.hides and bool(self.told)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        if (phase, self.step) == (self.case.phase, self.case.step) and x.numel():
            chance = Random(self.case.lie.seed)
            x[chance.randrange(x.numel())] = chance.choice((-(2**40), -1, 1, 3, 2**40))
            self.told = [rank for rank in range(self.world) if rank != self.rank]
        self.inner.all_reduce_(x, phase, control=control)


@dataclass
class Report:
    """What became of a rank: the bits it began with and those of each step that it has finished, and its error."""

    start: bytes | None = None
    steps: list[tuple[bytes, object]] = field(default_factory=list)
    error: Exception | None = None


def gradient(case: Case, rank: int, step: int) -> Tensor:
    """Heavy-tailed, with a block of large entries that moves from step to step: regions get out of balance."""
    generator = torch.Generator().manual_seed(case.number * 1000 + 10 * step + rank)
    grad = torch.randn(case.size, generator=generator).pow(3)
    start = case.size * (2 * step % 5) // 5
    grad[start : start + case.size // 5] *= 20
    return grad


def _algorithm(case: Case) -> oktopk.Algorithm:
    return replace(oktopk.ALGORITHMS[case.algorithm](), **dict(case.settings))


def _collective(case: Case, comm: oktopk.Communicator, report: Report) -> None:
    residual = torch.zeros(case.size) if case.residual else None
    state: Any = None
    for step in range(case.steps):
        if isinstance(comm, Liar):
            comm.step = step
        mean, info = oktopk.sparse_allreduce(
            gradient(case, comm.rank, step), case.density, _algorithm(case), residual, comm,
            values=case.values, state=state, step=step,
        )  # fmt: skip
        state = info.state
        report.steps.append((mean.numpy().tobytes(), getattr(state, "shared", None)))


def _engine(case: Case, comm: oktopk.Communicator, report: Report) -> None:
    """Two groups of buckets, so that a step has several reductions and one digest; first a broadcast."""
    half = case.size // 2
    names = {"a": slice(0, half // 2), "b": slice(half // 2, half), "c": slice(half, case.size)}
    parameters = [(name, torch.zeros(case.size)[place].requires_grad_()) for name, place in names.items()]
    initial = gradient(case, comm.rank, case.steps)
    oktopk.broadcast_tensors(comm, {name: initial[place] for name, place in names.items()})
    report.start = initial.numpy().tobytes()
    with oktopk.AllReducer(
        parameters, _algorithm(case), density=case.density, values=case.values, comm=comm, warmup_steps=0,
        buckets=[["c"], ["b", "a"]], fusion_entries=1, momentum=case.momentum, dense_below=case.dense_below,
    ) as reducer:  # fmt: skip
        for step in range(case.steps):
            if isinstance(comm, Liar):
                comm.step = step
            grad = gradient(case, comm.rank, step)
            means = reducer.sync({name: grad[place].clone() for name, place in names.items()})
            shared = [entry["tracking"] for entry in reducer.state_dict()["groups"]]
            told = [{k: v for k, v in one.items() if k != "local"} for one in shared if isinstance(one, dict)]
            report.steps.append((torch.cat([means[name] for name in names]).numpy().tobytes(), told))


def run(case: Case, timeout: float) -> tuple[list[Report], Liar]:
    """What became of each rank, and what the liar has said."""
    reports, liars = [Report() for _ in range(case.world)], []
    take_part: Callable[..., None] = _engine if case.engine else _collective

    def rank(comm: oktopk.Communicator) -> None:
        if comm.rank == case.liar:
            comm = Liar(comm, case)
            liars.append(comm)
        try:
            take_part(case, comm, reports[comm.rank])
        except Exception as error:
            reports[comm.rank].error = error.with_traceback(None)
            raise

    with suppress(Exception):  # each rank's own is in its report
        oktopk.run_threads(case.world, rank, timeout)
    return reports, liars[0]


def outcome(made: Case) -> str:
    """What became of a case; LawBroken if that is not right."""
    return outcome_and_reductions(made)[0]


def outcome_and_reductions(made: Case) -> tuple[str, int]:
    """The same, and how many reductions it had, if the lie was told. Who timed out gets a second, patient try."""
    reports, liar = run(made, IMPATIENT)
    try:
        found = judge(made, reports, liar)
    except Disturbed:
        reports, liar = run(made, PATIENT)
        found = judge(made, reports, liar)
    return found, 0 if found == UNTOLD else reductions(made, reports)


def reductions(made: Case, reports: list[Report]) -> int:
    """Steps that some rank has begun; what ended a rank before its first step is none."""
    begun = [
        len(report.steps) + (report.error is not None and (report.start is not None or not made.engine))
        for report in reports
    ]
    return min(max(begun), made.steps)


def judge(case: Case, reports: list[Report], liar: Liar) -> str:
    honest = [report for rank, report in enumerate(reports) if rank != case.liar]
    for report in honest:
        _check_error(report.error)
    starts = [report.start for report in honest if report.start is not None]
    if any(start != starts[0] for start in starts):
        raise LawBroken(f"the initial parameters differ between honest ranks: {case}")
    for step in range(case.steps):
        results = [report.steps[step] for report in honest if len(report.steps) > step]
        if any(result != results[0] for result in results):
            raise LawBroken(f"step {step} differs between honest ranks: {case}")
    late = any(isinstance(report.error, CommTimeout) for report in reports)
    wrong_error = Disturbed if late else LawBroken
    errors = [report.error for report in honest if report.error is not None]
    named = any(f"rank {case.liar}" in str(error).rsplit(" (rank ", 1)[0] for error in errors)
    if not liar.told:
        if errors:
            raise wrong_error(f"{errors[0]!r} without a lie: {case}")
        return UNTOLD
    if case.lie.kind == HEADER and not named:
        raise wrong_error(f"no error names rank {case.liar}, but {errors}: {case}")
    values = case.lie.kind in (VALUES, TWIN)
    if values and case.told_once and case.phase in RESULT_PHASES and len(errors) < len(honest):
        raise LawBroken(f"some honest ranks did not notice that they were told different results: {case}")
    if values and not case.told_once and case.hides and errors:
        raise wrong_error(f"another gradient is no lie, but {errors}: {case}")
    return NAMED if named else FOUND if errors else SAME


def _check_error(error: Exception | None) -> None:
    agreement = isinstance(error, ValueError) and str(error).startswith(("ranks disagree", "on rank "))
    if error is not None and not agreement and not isinstance(error, OkTopkError):
        raise LawBroken(f"not an error of the library: {error!r}") from error
