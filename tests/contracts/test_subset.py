"""Some ranks of a world keep the contract of every communicator, while the others do the same beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oktopk import Aborted, CommTimeout, Communicator, WireError, run_threads
from oktopk.comm import Operation, Subset, agree, pack
from tests.support import worlds
from tests.support.communicator_contracts import CONTRACTS

TIMEOUT, SHORT = 60.0, 0.25


def every_other(comm: Communicator) -> Subset:
    """The even ranks, or the odd ones."""
    return Subset(comm, range(comm.rank % 2, comm.world, 2))


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("size", worlds.SIZES)
def test_contract(size: int, contract: str) -> None:
    run_threads(2 * size, lambda comm: CONTRACTS[contract](every_other(comm)), TIMEOUT)


@pytest.mark.parametrize("size", worlds.SIZES)
@pytest.mark.parametrize("numbers", [0, 1, 5, 1000])
def test_sums_of_the_given_ranks_only(size: int, numbers: int) -> None:
    def job(comm: Communicator) -> torch.Tensor:
        x = torch.full((2, numbers), float(comm.rank))
        every_other(comm).all_reduce_(x.T, "test")  # not contiguous
        return x

    for rank, x in enumerate(run_threads(2 * size, job, TIMEOUT)):
        assert bool((x == sum(range(rank % 2, 2 * size, 2))).all())


def odd_ranks(comm: Communicator, job: Callable[[Subset], object]) -> object:
    """What comes of it on ranks 1 and 3, among themselves."""
    return job(Subset(comm, [1, 3], timeout=2 * SHORT)) if comm.rank % 2 else None


def test_errors_name_ranks_as_everybody_does() -> None:
    def disagree(odd: Subset) -> str:
        with pytest.raises(ValueError, match="ranks disagree") as caught:
            agree(odd, {"colour": odd.rank})
        return str(caught.value)

    _, one, _, three = run_threads(4, lambda comm: odd_ranks(comm, disagree), TIMEOUT)
    assert one == "ranks disagree on colour: rank 1 has 0, rank 3 1"
    assert three == "ranks disagree on colour: rank 3 has 1, rank 1 0"


def test_a_damaged_batch_names_its_sender() -> None:
    """Rank 5 sends rank 1 two messages in one, of which the second has lost its end; the others may not notice."""

    def gather(comm: Communicator) -> None:
        if comm.rank % 2 == 0:
            return
        odd = Subset(comm, [1, 3, 5, 7])
        if odd.rank == 2:
            damaged_batch(odd)
        else:
            odd.all_gather(pack(torch.ones(3)), 100, "batch")

    with pytest.raises(WireError, match=r"all_gather \(batch\): the message from rank 5"):
        run_threads(8, gather, TIMEOUT)


def damaged_batch(comm: Subset) -> None:
    operation = Operation("all_gather", "batch")
    comm.post_send(pack(torch.ones(3)), 1, operation)
    comm.post_send(pack(torch.zeros(3)), 0, operation)


def test_a_timeout_says_how_long_it_was() -> None:
    def wait(odd: Subset) -> str | None:
        if odd.rank == 0:
            return None
        with pytest.raises(CommTimeout) as caught:
            odd.recv(100, 0, "silence")
        return str(caught.value)

    said = run_threads(4, lambda comm: odd_ranks(comm, wait), SHORT)
    assert said[3] == f"recv (silence): no message from rank 1 within {2 * SHORT:g} s"


def test_a_failure_reaches_those_who_are_not_among_the_ranks() -> None:
    def job(comm: Communicator) -> str | None:
        if comm.rank == 0:
            every_other(comm).fail(ValueError("no more"))
            return None
        with pytest.raises(Aborted, match="rank 0 failed") as caught:
            every_other(comm).all_gather_ints([1], "test")
        return str(caught.value)

    said = run_threads_that_fail(4, job)
    assert "no more" in said


def run_threads_that_fail(world: int, job: object) -> str:
    with pytest.raises(ValueError, match="no more") as caught:
        run_threads(world, job, TIMEOUT)  # type: ignore[arg-type]
    return str(caught.value)
