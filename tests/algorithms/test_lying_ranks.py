"""What ranks tell each other beside gradients is checked, and an error names the rank that told nonsense."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.algorithms.oktopk import OkTopk
from oktopk.comm import Operation, Pending, Wrapped
from oktopk.comm.messages import seal
from oktopk.errors import CommError, WireError
from stress.fuzz import lies, lying

SIZE, LIAR, WORLD = 500, 1, 3


class Tells(Wrapped):
    """Replaces its own control messages of one phase."""

    def __init__(self, inner: oktopk.Communicator, phase: str, payload: Callable[[], Tensor]) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers, self.phase, self.payload = inner, inner.numbers, phase, payload

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        if operation.phase == self.phase and lies.is_sealed(message):
            number = int(message[24:28].view(torch.int32))
            message = seal(self.payload(), self.rank, number, operation)
        return self.inner.post_send(message, peer, operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return self.inner.post_recv(capacity, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        self.inner.all_reduce_(x, phase, control=control)


def counts(first: int) -> Tensor:
    """A report of 128 bins, the lowest of which holds `first`."""
    return torch.tensor([0, first, *[0] * 127], dtype=torch.int32)


NONSENSE: dict[str, tuple[str, Callable[[], Tensor], str]] = {
    "edges below 0": ("regions", lambda: torch.tensor([-1, 5]), "rank 1 proposed edges"),
    "edges that fall": ("regions", lambda: torch.tensor([300, 200]), "rank 1 proposed edges"),
    "edges beyond the end": ("regions", lambda: torch.tensor([3, SIZE + 1]), "rank 1 proposed edges"),
    "one edge": ("regions", lambda: torch.tensor([3]), "1 numbers from rank 1, expected 2"),
    "negative counts": ("counts", lambda: counts(-1), "rank 1 announced -1 sums"),
    "more than its region": ("counts", lambda: counts(400), "rank 1 announced 400 sums, at most"),
    "few counts": (
        "counts",
        lambda: torch.tensor([0, 1], dtype=torch.int32),
        "2 numbers from rank 1, expected 129",
    ),
    "a magnitude of NaN": (
        "magnitudes",
        lambda: torch.tensor([float("nan")]),
        "rank 1 sent numbers that are no mag",
    ),
    "a negative magnitude": ("magnitudes", lambda: torch.tensor([-1.0]), "rank 1 sent numbers that are no mag"),
    "too many sums": ("exact counts", lambda: torch.tensor([400, 0]), "rank 1 announced 400 sums, at most"),
    "no JSON": ("agreement", lambda: torch.tensor([91] * 5000, dtype=torch.uint8), "rank 1 sent invalid JSON"),
    "no terms": (
        "agreement",
        lambda: torch.tensor([91, 93], dtype=torch.uint8),
        "rank 1 sent something else than terms",
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_an_error_that_names_its_sender(what: str) -> None:
    phase, payload, message = NONSENSE[what]

    def job(comm: oktopk.Communicator) -> None:
        if comm.rank == LIAR:
            comm = Tells(comm, phase, payload)
        grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(comm.rank))
        oktopk.sparse_allreduce(grad, 0.1, comm=comm)

    with pytest.raises(WireError, match=re.escape(message)):
        oktopk.run_threads(WORLD, job, timeout=20)


def test_a_block_in_another_place_is_an_error_and_not_a_corrupted_heap() -> None:
    """The buffers are balanced, so that every part is decoded against the whole vector."""
    lie = lies.Lie(lies.PLACES, 5, own_only=True)
    base = lying.case(0)

    def job(comm: oktopk.Communicator) -> None:
        if comm.rank == LIAR:
            lied = replace(base, phase="gather", step=1, told_once=False, lie=lie, hides=True)
            comm = lying.Liar(comm, lied)
        state, residual = None, torch.zeros(30_000)
        for step in range(2):
            grad = torch.randn(30_000, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            if step:
                grad[:3000] *= 50  # one region has nearly all entries
            if isinstance(comm, lying.Liar):
                comm.step = step
            algorithm = OkTopk(imbalance=1.0)
            _, info = oktopk.sparse_allreduce(grad, 0.02, algorithm, residual, comm, state=state, step=step)
            state = info.state

    with pytest.raises(
        WireError, match=r"the part from rank \d begins at index \d+, not behind the part from rank"
    ):
        oktopk.run_threads(WORLD, job, timeout=20)


def test_a_sum_of_another_shape_is_an_error_on_every_rank() -> None:
    def job(comm: oktopk.Communicator) -> None:
        comm.all_reduce_(torch.zeros(5 if comm.rank else 1), "histogram")

    with pytest.raises(CommError, match=r"has \("):
        oktopk.run_threads(2, job, timeout=20)
