"""Initial tensors: those of rank 0 on every rank, or an error, whoever passes them on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk import Communicator, WireError, run_threads
from oktopk.comm import Operation, Pending, Wrapped
from oktopk.comm.messages import seal, unseal

START = Operation("broadcast", "start")


class Rewrites(Wrapped):
    """Changes the tensors that it passes on to one rank, and seals them again in the name of rank 0."""

    def __init__(self, inner: Communicator, victim: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers, self.victim, self.change = inner, inner.numbers, victim, change

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        if operation.phase == "start" and peer == self.victim:
            number = int(message[24:28].view(torch.int32))
            message = seal(self.change(unseal(message, 0, number, START, torch.uint8)), 0, number, START)
        return self.inner.post_send(message, peer, operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return self.inner.post_recv(capacity, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        self.inner.all_reduce_(x, phase, control=control)


def broadcast(world: int, liar: int, victim: int, change: Callable[[Tensor], Tensor]) -> list[Exception | None]:
    """The error of each rank; none of them is told about the others'."""

    def job(comm: Communicator) -> Exception | None:
        comm = Rewrites(comm, victim, change) if comm.rank == liar else comm
        try:
            oktopk.broadcast_tensors(comm, {"weight": torch.full((10,), 1.0), "count": torch.tensor(comm.rank)})
        except WireError as error:
            return error
        return None

    return run_threads(world, job, timeout=20)


def flip(payload: Tensor) -> Tensor:
    payload[3] ^= 1
    return payload


@pytest.mark.parametrize(("world", "liar", "victim"), [(4, 1, 3), (5, 0, 4), (3, 0, 1), (3, 0, 2)])
def test_other_tensors_for_one_rank_are_an_error_on_all(world: int, liar: int, victim: int) -> None:
    """Rank 0 may tell ranks different things, and so may one that passes them on (0 -> 1 -> 3)."""
    found = broadcast(world, liar, victim, flip)
    for error in found:
        assert "differ in the initial tensors" in str(error)


@pytest.mark.parametrize("change", [lambda payload: payload[:-8].clone(), lambda payload: payload[:0].clone()])
def test_tensors_of_another_length_name_those_who_sent_them(change: Callable[[Tensor], Tensor]) -> None:
    def job(comm: Communicator) -> None:
        comm = Rewrites(comm, 3, change) if comm.rank == 1 else comm
        oktopk.broadcast_tensors(comm, {"weight": torch.ones(10)})

    with pytest.raises(WireError, match=r"bytes from rank 0, passed on by rank 1, expected 40"):
        run_threads(4, job, timeout=20)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_all_ranks_get_the_tensors_of_rank_0(world: int) -> None:
    def job(comm: Communicator) -> list[list[float]]:
        mine = {"a": torch.full((3,), comm.rank + 1.0), "none": torch.empty(0), "b": torch.tensor([comm.rank])}
        oktopk.broadcast_tensors(comm, mine)
        return [tensor.tolist() for tensor in mine.values()]

    assert run_threads(world, job, timeout=20) == [[[1.0] * 3, [], [0]]] * world
