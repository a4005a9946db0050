"""Ranks that do not fit together all find out, before they do anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oktopk import Communicator, Metered, WireError, run_threads, sparse_allreduce
from oktopk.comm import agree, alone, pack, packed_bytes

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
SEVERAL = pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])


def errors(size: int, job: Callable[[Communicator], object]) -> list[Exception | None]:
    """The error of each rank, if it had one; none of them is told about the others'."""

    def run(comm: Communicator) -> Exception | None:
        try:
            job(comm)
        except Exception as error:
            return error
        return None

    return run_threads(size, run, timeout=60)


def assert_refused(found: list[Exception | None], *words: str) -> None:
    for rank, error in enumerate(found):
        assert isinstance(error, ValueError), f"rank {rank}: {error!r}"
        assert all(word in str(error) for word in words), f"rank {rank}: {error}"


@SIZES
def test_the_same_terms_are_agreed_on(size: int) -> None:
    terms = {"size": 5, "density": 0.01, "name": "größe", "nothing": None}
    assert errors(size, lambda comm: agree(comm, terms)) == [None] * size


def test_no_terms_at_all_are_agreed_on() -> None:
    agree(alone(), {})
    assert errors(3, lambda comm: agree(comm, {})) == [None] * 3


@SEVERAL
def test_one_rank_that_differs_is_an_error_on_all(size: int) -> None:
    for odd in range(size):
        found = errors(
            size, lambda comm, odd=odd: agree(comm, {"size": 5, "density": 7 if comm.rank == odd else 8})
        )
        assert_refused(found, "disagree on density", f"rank {odd}", "7", "8")


@SEVERAL
def test_all_ranks_may_differ(size: int) -> None:
    assert_refused(errors(size, lambda comm: agree(comm, {"step": comm.rank})), "disagree on step")


@SEVERAL
@pytest.mark.parametrize("odd", [0, 1])
def test_a_term_that_only_some_ranks_have_is_an_error_on_all(size: int, odd: int) -> None:
    found = errors(size, lambda comm: agree(comm, {"size": 5} | ({"step": 1} if comm.rank == odd else {})))
    assert_refused(found, "disagree on step")


def test_long_terms_that_differ_at_their_ends_are_told_apart() -> None:
    found = errors(3, lambda comm: agree(comm, {"algorithm": "x" * 1000 + str(comm.rank == 1)}))
    assert_refused(found, "disagree on algorithm")


@SIZES
def test_a_problem_on_one_rank_is_an_error_on_all(size: int) -> None:
    for odd in range(size):
        found = errors(size, lambda comm, odd=odd: agree(comm, {}, "too wet" if comm.rank == odd else None))
        assert_refused(found, "too wet")
        assert str(found[odd]) == "too wet"
        assert all(str(error) == f"on rank {odd}: too wet" for rank, error in enumerate(found) if rank != odd)


def test_ranks_with_problems_of_their_own_name_them() -> None:
    found = errors(3, lambda comm: agree(comm, {}, f"problem {comm.rank}" if comm.rank else None))
    assert [str(error) for error in found] == ["on rank 1: problem 1", "problem 1", "problem 2"]


def test_a_problem_comes_before_a_difference() -> None:
    found = errors(3, lambda comm: agree(comm, {"size": comm.rank}, "too wet" if comm.rank == 2 else None))
    assert_refused(found, "too wet")


@pytest.mark.parametrize("problem", ["long " * 2000, "größer " * 1000], ids=["ascii", "unicode"])
def test_a_problem_of_any_length_is_an_error_on_all(problem: str) -> None:
    assert_refused(errors(3, lambda comm: agree(comm, {}, problem if comm.rank == 1 else None)), problem[:100])


def test_terms_of_any_length_can_be_agreed_on() -> None:
    terms = {f"term {i}": "größer " * 100 for i in range(8)}
    assert errors(3, lambda comm: agree(comm, terms)) == [None] * 3


def test_something_unreadable_names_its_sender() -> None:
    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            noise = pack(torch.tensor([0xC0, 0x01, 0xFF], dtype=torch.uint8))
            comm.all_gather(noise, packed_bytes(4096), "agreement", control=True)
        else:
            agree(comm, {"size": 5})

    zero, one, two = errors(3, job)
    assert one is None
    for error in (zero, two):
        assert isinstance(error, WireError)
        assert "rank 1" in str(error)


@SIZES
def test_agreement_is_control_traffic(size: int) -> None:
    def job(comm: Communicator) -> tuple[int, bool]:
        meter = Metered(comm)
        agree(meter, {"size": 5})
        return meter.payload().sent_messages, meter.control().sent_messages > 0

    assert run_threads(size, job) == [(0, size > 1)] * size


MISTAKES: dict[str, dict[str, Any]] = {
    "a shorter tensor": {"tensor": torch.ones(99), "residual": torch.zeros(99)},
    "an empty tensor": {"tensor": torch.ones(0), "residual": torch.zeros(0)},
    "integers": {"tensor": torch.arange(100)},
    "complex numbers": {"tensor": torch.ones(100, dtype=torch.complex64)},
    "a sparse tensor": {"tensor": torch.ones(100).to_sparse()},
    "a list": {"tensor": [1.0] * 100},
    "density 0": {"density": 0},
    "density above 1": {"density": 1.5},
    "density nan": {"density": float("nan")},
    "density of another type": {"density": "0.1"},
    "another density": {"density": 0.2},
    "an unknown algorithm": {"algorithm": "nope"},
    "an algorithm with a very long name": {"algorithm": "nope" * 2000},
    "a list of algorithms": {"algorithm": ["oktopk"]},
    "another algorithm": {"algorithm": "topka"},
    "an unknown value format": {"values": "fp8"},
    "a list of value formats": {"values": ["fp32"]},
    "another value format": {"values": "fp16"},
    "no residual": {"residual": None},
    "a list for a residual": {"residual": [0.0] * 100},
    "a residual of another type": {"residual": torch.zeros(100, dtype=torch.float64)},
    "a residual of another size": {"residual": torch.zeros(101)},
    "a residual with gaps": {"residual": torch.zeros(200)[::2]},
    "a state out of nowhere": {"state": 0.5},
    "another step": {"step": 3},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_one_rank_is_a_value_error_on_all(mistake: str) -> None:
    def job(comm: Communicator) -> None:
        arguments = {"tensor": torch.ones(100), "density": 0.1, "residual": torch.zeros(100)}
        sparse_allreduce(**(arguments | (MISTAKES[mistake] if comm.rank == 1 else {})), comm=comm)

    assert_refused(errors(3, job))


LIES = {
    "nested": b"[" * 60_000,
    "no JSON": b"\xff{",
    "a number": b"7",
    "no terms": b'{"problem": null}',
    "no dictionary of terms": b'{"problem": null, "terms": [1]}',
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_agreement_is_a_wire_error_that_names_the_rank(lie: str) -> None:
    def job(comm: Communicator) -> str:
        if comm.rank == 1:
            said = torch.frombuffer(bytearray(LIES[lie]), dtype=torch.uint8)
            comm.all_gather_sealed(said, 1 << 16, "agreement")
            return ""
        with pytest.raises(WireError) as caught:
            agree(comm, {"density": 0.1})
        return str(caught.value)

    said = run_threads(3, job)
    assert all("rank 1 sent" in said[rank] for rank in (0, 2)), said
