"""What other ranks send is checked where it arrives, and kernels write nowhere else, whatever they are given."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import oktopk
from oktopk.comm.messages import broadcast_relays, gather_relays
from oktopk.errors import WireError
from oktopk.kernels import backend_for
from oktopk.wire.message import ValueCode, encode, max_message_bytes
from oktopk.wire.sparse_comm import Phase, SparseCommunicator
from oktopk.wire.sparse_vector import MisplacedPart, SparseVector

N = 1000
KERNELS = backend_for("cpu")


def vector(*indices: int, size: int = N) -> SparseVector:
    return SparseVector(torch.tensor(indices, dtype=torch.int32), torch.arange(1.0, len(indices) + 1), size)


def outside() -> dict[str, Any]:
    """Kernels that write by index, called with indices that leave their memory."""
    out = torch.zeros(N)
    unsorted = vector(5, -100_000, 7).indices
    beyond = vector(5, 7, N + 3).indices
    values = torch.ones(3)
    return {
        "add": lambda: KERNELS.scatter_add_(out, unsorted, values),
        "add beyond": lambda: KERNELS.scatter_add_(out, beyond, values),
        "add to pieces": lambda: KERNELS.scatter_add_pieces_([out[:300], out[300:]], unsorted, values),
        "assign": lambda: KERNELS.assign_(out, unsorted, values),
        "assign beyond": lambda: KERNELS.assign_(out, beyond, values),
        "assign pieces": lambda: KERNELS.assign_pieces_([out[:300], out[300:]], unsorted, values),
        "sum": lambda: KERNELS.union_sum([(unsorted, values)], 0, N),
        "sum beyond": lambda: KERNELS.union_sum([(beyond, values)], 0, N),
    }


@pytest.mark.parametrize("kernel", outside())
def test_no_kernel_writes_outside_its_memory(kernel: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        outside()[kernel]()


def test_unsorted_indices_are_not_encoded() -> None:
    """Elias-Fano would set bits outside the message."""
    indices = torch.arange(0, 700_000, 700, dtype=torch.int32)
    indices[500] = -(2**30)
    part = SparseVector(indices, torch.ones(1000), 700_000)
    tag = SparseCommunicator(oktopk.comm.alone(), 700_000)._tag(Phase.GATHER, 0, (0, 700_000))
    with pytest.raises(ValueError, match="out of order"):
        encode(part, tag, ValueCode.FP32)


@pytest.mark.parametrize(
    ("parts", "places"),
    [
        ([(1, 2), (3, 4), (5,)], None),
        ([(1, 9), (), (5, 6)], (0, 2)),
        ([(1,), (1,)], (0, 1)),
        ([(), (), (3,)], None),
    ],
)
def test_parts_are_joined_in_order_only(parts: list[tuple[int, ...]], places: tuple[int, int] | None) -> None:
    vectors = [vector(*indices) for indices in parts]
    if places is None:
        assert SparseVector.join(vectors).indices.tolist() == [index for indices in parts for index in indices]
        return
    with pytest.raises(MisplacedPart) as caught:
        SparseVector.join(vectors)
    assert caught.value.places == places


def gather_with_a_liar(false: SparseVector, **expected: Any) -> None:
    """Three ranks gather a part each; rank 2 sends `false`."""

    def job(comm: oktopk.Communicator) -> None:
        channel = SparseCommunicator(comm, N)
        part = false if comm.rank == 2 else vector(10 * comm.rank + 1, 10 * comm.rank + 2)
        channel.join(channel.all_gather(part, max_message_bytes(N, N, ValueCode.FP32), **expected))

    oktopk.run_threads(3, job, timeout=20)


def test_a_part_in_another_ranks_place_is_an_error_that_names_it() -> None:
    with pytest.raises(WireError, match="part from rank 2 begins at index 3, not behind the part from rank 1"):
        gather_with_a_liar(vector(3, 4))


def test_a_part_of_another_length_is_an_error_that_names_its_sender() -> None:
    with pytest.raises(WireError, match="message from rank 2: 3 entries, expected 2"):
        gather_with_a_liar(vector(31, 32, 33), counts=[2, 2, 2])
    with pytest.raises(WireError, match="message from rank 2: 3 entries, expected at most 2"):
        gather_with_a_liar(vector(31, 32, 33), limit=2)


def test_numbers_of_another_length_are_an_error_that_names_their_sender() -> None:
    def job(comm: oktopk.Communicator) -> None:
        if comm.rank == 1:
            comm.all_gather_sealed(torch.tensor([1]), 16, "counts")
        else:
            comm.all_gather_ints([1, 2], "counts")

    with pytest.raises(WireError, match="1 numbers from rank 1, expected 2"):
        oktopk.run_threads(3, job, timeout=20)


@pytest.mark.parametrize("world", range(1, 12))
def test_relays_are_the_ranks_that_pass_a_message_on(world: int) -> None:
    """Each rank appends itself to what it passes on in a gather of letters."""
    for receiver in range(world):
        for sender in range(world):
            route = [sender, *reversed(gather_relays(sender, receiver, world)), receiver]
            hops = [(a - b) % world for a, b in pairwise(route)]
            assert all(hop & (hop - 1) == 0 for hop in hops if sender != receiver)  # Bruck's distances
            assert hops == sorted(hops)
        route = [0, *reversed(broadcast_relays(receiver)), receiver]
        assert all(b - a == 1 << (b.bit_length() - 1) for a, b in pairwise(route) if b)


LARGE = 2**31 + 10**6


def test_indices_above_2_31_pass_through_split_sum_gather_and_wire() -> None:
    """Sparse vectors of more than 2^31 entries on three ranks, without a dense buffer."""
    edges = [0, 7, 2**31 - 1, LARGE]
    mine = [5, 2**31 - 2, 2**31 - 1, 2**31, LARGE - 1]

    def job(comm: oktopk.Communicator) -> tuple[list[int], list[float]]:
        channel = SparseCommunicator(comm, LARGE)
        local = SparseVector(torch.tensor(mine), torch.arange(1.0, 6.0) * (comm.rank + 1), LARGE)
        sums, sent = oktopk.algorithms.base.split_and_reduce(channel, local, edges, 5)
        assert sent.indices.tolist() == mine
        capacity = max_message_bytes(5, LARGE, ValueCode.FP32)
        result = channel.join(channel.all_gather(sums, capacity, edges, limit=5))
        assert result.indices.dtype == torch.int64
        assert local.common(result).indices.tolist() == mine
        assert result.at_least(20.0).indices.tolist() == mine[3:]
        return result.indices.tolist(), result.values.tolist()

    expected = mine, [6.0, 12.0, 18.0, 24.0, 30.0]
    assert oktopk.run_threads(3, job, timeout=60) == [expected] * 3
