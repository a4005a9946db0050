"""Sealed messages: what arrives is what was sent, from whom and when it was to come, or it is an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import Communicator, WireError, run_threads
from oktopk.comm import Operation
from oktopk.comm.messages import seal, sealed_bytes, unseal

COUNTS, SUMS = Operation("all_gather", "counts", control=True), Operation("all_gather", "sums", control=True)
NUMBERS = torch.tensor([3, -1, 2**40])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 7])
def test_the_payload_arrives(size: int, dtype: torch.dtype) -> None:
    payload = torch.arange(size, dtype=dtype)
    message = seal(payload, 2, 5, COUNTS)
    assert message.numel() == sealed_bytes(payload.nbytes)
    received = unseal(message, 2, 5, COUNTS, dtype)
    assert received.dtype == dtype
    assert torch.equal(received, payload)


def test_no_bit_can_be_flipped() -> None:
    message = seal(NUMBERS, 2, 5, COUNTS)
    for byte in range(message.numel()):
        for bit in range(8):
            spoilt = message.clone()
            spoilt[byte] ^= 1 << bit
            with pytest.raises(WireError, match=r"all_gather \(counts\): .*rank 2"):
                unseal(spoilt, 2, 5, COUNTS, torch.int64)


@given(st.binary(max_size=100))
def test_noise_is_an_error(noise: bytes) -> None:
    with pytest.raises(WireError, match="rank 2"):
        unseal(torch.frombuffer(bytearray(noise) or bytearray(1), dtype=torch.uint8), 2, 5, COUNTS, torch.uint8)


def test_no_end_can_be_missing() -> None:
    message = seal(NUMBERS, 2, 5, COUNTS)
    for size in range(message.numel()):
        with pytest.raises(WireError):
            unseal(message[:size], 2, 5, COUNTS, torch.uint8)


@pytest.mark.parametrize("expected", [(1, 5, COUNTS), (2, 6, COUNTS), (2, 5, SUMS)])
def test_another_message_is_an_error(expected: tuple[int, int, Operation]) -> None:
    """Of another sender, of another time, of another phase."""
    with pytest.raises(WireError, match="another operation"):
        unseal(seal(NUMBERS, 2, 5, COUNTS), *expected, torch.int64)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_number_alike(world: int) -> None:
    def job(comm: Communicator) -> list[list[int]]:
        told = [torch.cat(comm.all_gather_sealed(torch.tensor([comm.rank]), 8, "who")).tolist() for _ in range(3)]
        told.append(comm.broadcast_sealed(torch.tensor([7, 8], dtype=torch.uint8), 2, "start").tolist())
        return told

    assert run_threads(world, job) == [[list(range(world))] * 3 + [[7, 8]]] * world


def test_a_rank_that_has_missed_one_is_told_from_the_others() -> None:
    def job(comm: Communicator) -> None:
        if comm.rank == 1:
            next(comm.numbers)
        comm.all_gather_sealed(torch.tensor([1]), 8, "who")

    with pytest.raises(WireError, match=r"all_gather \(who\): the message from rank \d belongs to another"):
        run_threads(2, job, timeout=20)
