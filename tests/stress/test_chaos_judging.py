"""The tool itself: faults do what they say, cases can be repeated, and the judge sees what is wrong."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk import CommError, CommTimeout, Communicator, OkTopkError
from oktopk.comm import Operation, pack, packed_bytes, unpack
from oktopk.wire import message
from stress.chaos import cases, on_threads, process_cases, run
from stress.chaos.cases import PATIENT, Job
from stress.chaos.faults import EVERYBODY, Burned, Fault, Faulty, Moment, damaged
from stress.chaos.jobs import Report, Step
from stress.chaos.judging import (
    ABORTED,
    CHANGED,
    ENDED,
    MISSED,
    OF_A_RANK,
    WENT_ON,
    WRONG,
    GlooAbort,
    judge,
    judge_sums,
)
from tests.support import stepping

# Faults of messages.


LAST = 99


def letter(number: int) -> Tensor:
    return pack(torch.full((20,), number, dtype=torch.uint8))


def third_is_struck(kind: str) -> list[int | str]:
    """What rank 1 receives when rank 0 sends the letters 0 to 3, and something happens to letter 2."""

    def job(comm: Communicator) -> list[int | str]:
        faulty = Faulty(comm, Fault(kind, 0, Moment(0, "mail", 1, 2), seconds=0.3, seed=1))
        if comm.rank == 0:
            for number in (*range(4), LAST):
                faulty.send(letter(number), 1, "mail")
            return []
        received: list[int | str] = []
        while LAST not in received:
            try:
                received.append(int(unpack(faulty.recv(packed_bytes(20), 0, "mail"), torch.uint8).unique()))
            except CommTimeout:
                raise
            except (OkTopkError, RuntimeError):
                received.append("damaged")
        return received[:-1]

    return oktopk.run_threads(2, job, timeout=60.0)[1]


@pytest.mark.parametrize(
    ("kind", "arrive"),
    [
        ("delay", [0, 1, 2, 3]),
        ("drop", [0, 1, 3]),
        ("cut", [0, 1, "damaged", 3]),
        ("duplicate", [0, 1, 2, 2, 3]),
        ("corrupt", [0, 1, "damaged", 3]),
    ],
)
def test_what_arrives(kind: str, arrive: list[int | str]) -> None:
    assert third_is_struck(kind) == arrive


@pytest.mark.parametrize("seed", range(50))
def test_damage_is_damage(seed: int) -> None:
    message = letter(7)
    cut, spoilt = damaged(message, "cut", seed), damaged(message, "corrupt", seed)
    assert 0 < cut.numel() < message.numel()
    assert torch.equal(cut, message[: cut.numel()])
    assert spoilt.numel() == message.numel()
    assert not torch.equal(spoilt, message)


def test_a_slow_rank_is_slow_from_then_on() -> None:
    def job(comm: Communicator) -> float:
        faulty = Faulty(comm, Fault("slow", 0, Moment(0, "mail", 1, 1), seconds=0.02))
        start = time.monotonic()
        for number in range(4):
            faulty.post_send(letter(number), 1, Operation("send", "mail"))
        return time.monotonic() - start

    assert oktopk.run_threads(2, lambda comm: comm.rank or job(comm))[0] >= 0.06


# Cases.


def test_a_case_can_be_repeated() -> None:
    for number in (0, 1, 17):
        moments = [report.moments for report in on_threads.undisturbed(number // cases.FAULTS_PER_JOB)]
        assert cases.job_of(number) == cases.job_of(number)
        assert cases.fault_of(number, moments) == cases.fault_of(number, moments)


def test_cases_differ() -> None:
    jobs = [cases.job_of(number) for number in range(0, 1200, cases.FAULTS_PER_JOB)]
    assert {job.world for job in jobs} == set(range(2, 9))
    assert {job.algorithm for job in jobs} == set(oktopk.ALGORITHMS)
    assert {job.values for job in jobs} == set(oktopk.wire.message.VALUE_CODES)
    assert len({job.fusion_entries for job in jobs}) > 1
    assert {job.front_end for job in jobs} == {"reducer", "collective"}


# The judge.

JOB = Job(world=2, algorithm="oktopk", front_end="reducer", steps=1, density=0.05, values="fp32")
DROP = Fault("drop", 0, Moment(0, "split", 1, 0))
NAMED = CommTimeout("all_to_all (split): no message from rank 0 within 1 s (rank 1, step 0)")


def good_step() -> list[Step]:
    """On two ranks: 3 and 5 are given, 4 is the mean of what is sent, and nothing stays."""
    zero, mean = torch.zeros(2), torch.tensor([4.0, 0.0])
    return [Step(zero, torch.tensor([given, 0.0]), mean, zero, False) for given in (3.0, 5.0)]


def verdict(*changed: Report, harmless: bool = False, fault: Fault = DROP, struck: bool = True) -> tuple[str, str]:
    expected = [Report([step]) for step in good_step()]
    reports = list(changed or expected)
    if struck:
        reports[fault.rank].struck = 1.0
    return judge(JOB, fault, expected, reports, harmless)


def test_what_is_right_is_found_right() -> None:
    one = good_step()[0]
    assert verdict() == (WENT_ON, "")
    assert verdict(Report([one]), Report([], NAMED)) == (ENDED, "")
    assert verdict(Report([], Burned("fire")), Report([], NAMED)) == (ENDED, "")


def test_what_is_wrong_is_found_wrong() -> None:
    one, two = good_step()
    kept = replace(two, after=torch.tensor([1e-9, 0.0]))
    other, lost = replace(two, result=two.result + 1e-6), replace(two, after=torch.tensor([0.0, 1e-3]))
    nameless = [
        CommTimeout("all_reduce (regions): no answer from the other ranks within 1 s (rank 1, step 0)"),
        CommTimeout("all_to_all (split): no message from rank 0 within 1 s"),
        CommTimeout("no message from rank 0 (rank 1, step 0)"),
        CommTimeout("all_to_all (split): no message from rank 0 (rank 1, step 3)"),
        RuntimeError("all_to_all (split): no message from rank 0 (rank 1, step 0)"),
    ]
    for changed, says in [
        ([Report([one]), Report([other])], "replicas differ"),
        ([Report([replace(one, result=other.result)]), Report([other])], "mass is lost"),
        ([Report([one]), Report([lost])], "mass is lost"),
        ([Report([one]), Report([])], "without an error"),
        ([Report([], Burned("fire")), Report([], Burned("fire"))], "rank 1 ended in step 0, and says"),
        *(([Report([one]), Report([], error)], "rank 1") for error in nameless),
    ]:
        went, what = verdict(*changed)
        assert went == WRONG
        assert says in what
    moved = [replace(step, result=step.result / 2, after=step.given / 2) for step in good_step()]
    assert verdict(*(Report([step]) for step in moved))[1].startswith("rank 0 has another result")
    assert verdict(Report([one]), Report([], NAMED), harmless=True)[0] == WRONG
    assert verdict(Report([one]), Report([kept]))[1].startswith("rank 1 has another residual")


def test_a_skipped_step_keeps_what_was_given_or_nothing_of_it() -> None:
    zero, ones = torch.zeros(2), torch.ones(2)
    fine = Step(ones, torch.tensor([1.0, torch.nan]), zero, ones, True)
    kept, spoilt = torch.tensor([2.0, 1.0]), torch.tensor([1.0, torch.nan])
    for after, went in [(ones, WENT_ON), (kept, WENT_ON), (zero, WRONG), (1.5 * ones, WRONG), (spoilt, WRONG)]:
        step = replace(fine, after=after)
        struck = [Report([step], struck=1.0), Report([step])]
        assert judge(JOB, DROP, [Report([step])] * 2, struck, False)[0] == went


LOST_BY_DDP = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.mark.parametrize(("front_end", "other", "went"), [
    ("ddp", NAMED, ENDED), ("ddp", LOST_BY_DDP, WRONG), ("reducer", NAMED, WRONG),
])  # fmt: skip
def test_ddp_may_lose_a_rank_that_has_said_why(front_end: str, other: Exception, went: str) -> None:
    job, reports = replace(JOB, front_end=front_end), [Report([], LOST_BY_DDP, struck=1.0), Report([], other)]
    assert judge(job, DROP, [Report([step]) for step in good_step()], reports, False)[0] == went


@pytest.mark.parametrize(("front_end", "went"), [("ddp", ENDED), ("reducer", WRONG)])
def test_ddp_may_lose_a_rank_that_was_killed(front_end: str, went: str) -> None:
    job, fault = replace(JOB, front_end=front_end), replace(DROP, kind="die with a child")
    reports = [Report([], Burned("die"), struck=1.0), Report([], LOST_BY_DDP)]
    assert judge(job, fault, [Report([step]) for step in good_step()], reports, False)[0] == went


ABORT = GlooAbort("[enforce fail at gloo/transport/tcp/pair.cc:600]")


def test_gloo_may_change_a_sum_or_abort_but_not_if_harmless() -> None:
    fault = replace(DROP, kind="corrupt bytes", moment=Moment(0, "dense", EVERYBODY, 0))
    nameless = CommTimeout("all_reduce (dense): no answer from the other ranks within 1 s (rank 1, step 0)")
    nameless_0 = CommError("all_reduce (dense): the connection to the other ranks failed (rank 0, step 0)")
    expected, (one, two) = [Report([step]) for step in good_step()], good_step()
    other = replace(two, result=two.result + 1)
    for reports, harmless, went in [
        ([Report([one]), Report([two])], True, WENT_ON),
        ([Report([one]), Report([other])], False, CHANGED),
        ([Report([one]), Report([other])], True, WRONG),
        ([Report([one]), Report([], nameless)], False, ENDED),
        ([Report([one]), Report([], nameless)], True, WRONG),
        ([Report([one]), Report([], RuntimeError("crash"))], False, WRONG),
        ([Report([], nameless_0), Report([], ABORT)], False, ABORTED),
        ([Report([], nameless_0), Report([], ABORT)], True, WRONG),
        ([Report([]), Report([], ABORT)], False, WRONG),
        ([Report([one]), Report([])], False, WRONG),
    ]:
        reports[0].struck = 1.0
        assert judge_sums(JOB, fault, expected, reports, harmless)[0] == went
    assert judge_sums(JOB, fault, expected, expected, False)[0] == MISSED


def test_who_is_lost_has_to_be_named() -> None:
    innocent = CommTimeout("all_to_all (split): no message from rank 3 within 1 s (rank 1, step 0)")
    for kind in OF_A_RANK:
        for error, went in [(NAMED, ENDED), (innocent, WRONG)]:
            fault = replace(DROP, kind=kind)
            assert verdict(Report([], Burned("fire")), Report([], error), fault=fault)[0] == went


def test_a_fault_that_does_not_happen_is_not_a_case() -> None:
    assert verdict(struck=False)[0] == MISSED
    job, never = replace(JOB, steps=2), replace(DROP, moment=Moment(7, "split", 1, 0))
    reports = on_threads.run(job, never, PATIENT)
    assert reports is not None
    assert judge(job, never, reports, reports, False)[0] == MISSED


CASES = range(run.arguments().parse_args([]).processes)
"""Those of `make chaos` on processes."""


def test_every_fault_of_every_setting_has_its_turn() -> None:
    settings = tuple(process_cases.SETTINGS)
    for name, setting in process_cases.SETTINGS.items():
        turns = [
            process_cases.kind_of(number, settings)
            for number in CASES
            if process_cases.setting_of(number, settings) == name
        ]
        counts = [turns.count(kind) for kind in setting.kinds]
        assert min(counts) >= max(counts) - 1 >= 0


@pytest.mark.parametrize("absent", [(), ("mpi",), ("lab", "mpi")])
def test_there_are_enough_cases_of_everything(absent: tuple[str, ...]) -> None:
    settings = [name for name in process_cases.SETTINGS if name not in absent]
    names = [process_cases.setting_of(number, settings) for number in CASES]
    relayed = [name for name in names if process_cases.SETTINGS[name].relay == process_cases.MESH]
    assert sum(name != "mpi" for name in names) >= 200
    assert sum(process_cases.SETTINGS[name].front_ends == ("ddp",) for name in names) >= 60
    assert len(relayed) >= 60
    assert names.count("fork") >= 20


def test_cases_of_processes_can_be_repeated_and_differ() -> None:
    settings = list(process_cases.SETTINGS)
    jobs = [process_cases.job_of(number, settings) for number in CASES]
    assert jobs == [process_cases.job_of(number, settings) for number in CASES]
    assert {job.front_end for job in jobs} == {"reducer", "collective", "ddp"}
    assert {job.world for job in jobs} == {2, 3, 4}


def test_a_message_that_is_believed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checksums, and so without digests, a damaged value is believed: the judge sees what comes of it."""
    job = replace(JOB, steps=2, buckets=stepping.SEVERAL)
    expected = on_threads.run(job, None, PATIENT)
    assert expected is not None
    monkeypatch.setattr(message, "_checksum", lambda _: 0)
    found = []
    for seed in range(12):
        fault = Fault("corrupt", 1, Moment(0, "split", 0, 0), seed=seed)
        reports = on_threads.run(job, fault, PATIENT)
        assert reports is not None
        found.append(judge(job, fault, expected, reports, harmless=False))
    assert {went for went, _ in found} >= {WRONG, WENT_ON}  # some damage is where nobody looks
    assert any("another result" in what or "differ" in what for _, what in found), found
