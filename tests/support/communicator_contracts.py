"""What every communicator promises: each contract is a function that all ranks of a world run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oktopk import CommError, Communicator, OkTopkError
from oktopk.comm import Operation, agree, pack, packed_bytes, unpack
from tests.support import worlds


def letter(size: int, *names: int) -> Tensor:
    """A message of `size` bytes of payload, different for different names."""
    shift = sum((7 * name + 3) * 31**place for place, name in enumerate(names))
    return pack(torch.arange(251, dtype=torch.uint8).roll(shift).repeat(size // 251 + 1)[:size])


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert [message.numel() for message in got] == [message.numel() for message in wanted]
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one, other), f"message {place} of {len(got)} differs"


def assert_same_bits(comm: Communicator, x: Tensor) -> None:
    mine = pack(x.flatten())
    assert_same(comm.all_gather(mine, mine.numel(), "bits"), [mine] * comm.world)


def assert_usable(comm: Communicator) -> None:
    assert comm.all_gather_ints([comm.rank], "usable") == [[r] for r in range(comm.world)]


def contract_ranks_are_numbered(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.world
    assert comm.all_gather_ints([comm.rank, comm.world], "numbers") == [[r, comm.world] for r in range(comm.world)]


def contract_messages_between_two_ranks_keep_their_order(comm: Communicator) -> None:
    """They go round in a ring, and rank 0 gets back what it sent."""
    letters = [letter(size, size) for size in (0, 5, 0, 300, 1, 70_000)]
    capacity = letters[-1].numel()
    ahead, behind = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    if comm.world == 1:
        return
    if comm.rank == 0:
        for message in letters:
            comm.send(message, ahead, "ring")
    received = [comm.recv(capacity, behind, "ring") for _ in letters]
    if comm.rank:
        for message in received:
            comm.send(message, ahead, "ring")
    assert_same(received, letters)


def contract_all_gather_is_ragged(comm: Communicator) -> None:
    """Every length from nothing to the whole capacity, on every rank in turn."""
    payloads = [0, 1, 7, 8, 63, 1000, 0, 1016]
    capacity = packed_bytes(max(payloads))
    for turn in range(len(payloads)):
        everybody = [letter(payloads[(r + turn) % len(payloads)], r, turn) for r in range(comm.world)]
        assert_same(comm.all_gather(everybody[comm.rank], capacity, "ragged"), everybody)


def contract_all_gather_of_nothing(comm: Communicator) -> None:
    nothing = letter(0)
    gathered = comm.all_gather(nothing, nothing.numel(), "nothing")
    assert [unpack(message, torch.int64).tolist() for message in gathered] == [[]] * comm.world


def contract_all_to_all_is_ragged(comm: Communicator) -> None:
    def between(source: int, to: int) -> Tensor:
        return letter((5 * source + 3 * to) % 17, source, to)

    outgoing = [between(comm.rank, to) for to in range(comm.world)]
    received = comm.all_to_all(outgoing, packed_bytes(16), "ragged")
    assert_same(received, [between(source, comm.rank) for source in range(comm.world)])


def contract_exchange_yields_the_nearest_below_first(comm: Communicator) -> None:
    outgoing = [letter(100, comm.rank, to) for to in range(comm.world)]
    received = list(comm.exchange(outgoing, outgoing[0].numel(), "order"))
    below = [(comm.rank - step) % comm.world for step in range(1, comm.world)]
    assert [source for source, _ in received] == below
    assert_same([message for _, message in received], [letter(100, source, comm.rank) for source in below])


def contract_exchange_leaves_out_who_has_nothing_to_say(comm: Communicator) -> None:
    for modulus in (1, 2, 3):  # at 1 nobody says anything
        outgoing = [
            letter(9, comm.rank, to) if (comm.rank + 2 * to) % modulus else None for to in range(comm.world)
        ]
        sources = [(source + 2 * comm.rank) % modulus != 0 for source in range(comm.world)]
        received = list(comm.exchange(outgoing, packed_bytes(9), "holes", sources=sources))
        below = [(comm.rank - step) % comm.world for step in range(1, comm.world)]
        assert [source for source, _ in received] == [source for source in below if sources[source]]
        assert_same([m for _, m in received], [letter(9, source, comm.rank) for source, _ in received])


def contract_broadcast_reaches_everybody(comm: Communicator) -> None:
    for size in (0, 1, 1000, 1016):
        message = letter(size, size)
        got = comm.broadcast(message if comm.rank == 0 else None, packed_bytes(1016), "broadcast")
        assert_same([got], [message])


def contract_all_reduce_sums(comm: Communicator) -> None:
    """Small integers, which every type can add without rounding."""
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16, torch.bfloat16):
        x = (torch.arange(37) % 5 + comm.rank).to(dtype)
        comm.all_reduce_(x, "sum")
        wanted = (torch.arange(37) % 5 * comm.world + sum(range(comm.world))).to(dtype)
        assert torch.equal(x, wanted), f"{dtype}: {x} instead of {wanted}"


def contract_all_reduce_has_the_same_bits_everywhere(comm: Communicator) -> None:
    """Sums that round, differently in every order of adding up."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        for size in (1, comm.world, 1009, 40_000):
            parts = torch.randn(comm.world, size, dtype=dtype, generator=torch.Generator().manual_seed(size))
            x = parts[comm.rank] * 10.0 ** (comm.rank % 3)
            wanted = sum(parts[r] * 10.0 ** (r % 3) for r in range(comm.world))
            comm.all_reduce_(x, "bits")
            assert bool(((x - wanted).abs() <= tolerance * 1000).all()), f"{dtype}, {size} entries"
            assert_same_bits(comm, x)


def contract_all_reduce_of_any_shape(comm: Communicator) -> None:
    """Nothing but the entries of x is touched."""
    storage = torch.ones(12)
    comm.all_reduce_(storage[1::2], "stride")
    assert storage.tolist() == [1.0, float(comm.world)] * 6
    matrix, empty = torch.ones(2, 3), torch.empty(0)
    comm.all_reduce_(matrix.t(), "transposed")
    comm.all_reduce_(empty, "empty")
    assert matrix.tolist() == [[float(comm.world)] * 3] * 2


def contract_several_sums_may_be_under_way(comm: Communicator) -> None:
    """Of any size and type, waited for in order; each is the sum that all_reduce_ gives, to the bit."""
    sizes = (1, 1009, 0, 300_000, 7)
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(size + comm.rank)) for size in sizes]
    parts += [torch.arange(37) + comm.rank, torch.randn(12, dtype=torch.float64)]
    begun, done = [part.clone() for part in parts], [part.clone() for part in parts]
    for pending in [comm.begin_all_reduce(x, "begun", control=x is begun[0]) for x in begun]:
        pending.wait()
    for got, wanted in zip(begun, done, strict=True):
        comm.all_reduce_(wanted, "done")
        assert torch.equal(got, wanted)
        assert_same_bits(comm, got)


def contract_a_sum_under_way_touches_its_entries_only(comm: Communicator) -> None:
    """Also if they are not contiguous; and messages may follow once it is waited for."""
    storage, matrix = torch.ones(12), torch.ones(2, 3)
    pending = [comm.begin_all_reduce(x, "stride") for x in (storage[1::2], matrix.t())]
    for sum_ in pending:
        sum_.wait()
    assert storage.tolist() == [1.0, float(comm.world)] * 6
    assert matrix.tolist() == [[float(comm.world)] * 3] * 2
    assert_usable(comm)


def contract_large_messages(comm: Communicator) -> None:
    size = 1_500_001
    everybody = [letter(size + r, r) for r in range(comm.world)]
    capacity = packed_bytes(size + comm.world)
    assert_same(comm.all_gather(everybody[comm.rank], capacity, "large"), everybody)
    for source, message in comm.exchange([everybody[comm.rank]] * comm.world, capacity, "large"):
        assert_same([message], [everybody[source]])
    assert_same([comm.broadcast(everybody[0] if comm.rank == 0 else None, capacity, "large")], [everybody[0]])
    x = torch.full((1_000_003,), float(comm.rank))
    comm.all_reduce_(x, "large")
    assert bool((x == sum(range(comm.world))).all())


def contract_the_sender_may_reuse_its_buffers(comm: Communicator) -> None:
    """What an operation has sent is not changed by what its sender does afterwards."""
    size, world, rank = 50_000, comm.world, comm.rank
    for turn in range(3):
        mine, rows = letter(size, rank, turn), [letter(size, rank, to, turn) for to in range(world)]
        gathered = comm.all_gather(mine, mine.numel(), "reuse")
        mine.fill_(255)
        received = dict(comm.exchange(rows, rows[0].numel(), "reuse"))
        for row in rows:
            row.fill_(255)
        root = letter(size, turn)
        told = comm.broadcast(root if rank == 0 else None, root.numel(), "reuse")
        root.fill_(255)
        assert_usable(comm)
        others = [r for r in range(world) if r != rank]
        assert_same([gathered[r] for r in others], [letter(size, r, turn) for r in others])
        assert_same([received[r] for r in others], [letter(size, r, rank, turn) for r in others])
        assert_same([told] if rank else [], [letter(size, turn)] if rank else [])


def contract_received_messages_are_the_receivers_own(comm: Communicator) -> None:
    """Writing to one of them changes no other."""
    mine = letter(33, comm.rank)
    gathered = comm.all_gather(mine, 2 * mine.numel(), "own")
    for r in range(comm.world):
        assert_same(gathered[r:], [letter(33, s) for s in range(r, comm.world)])
        gathered[r].zero_()
    assert_usable(comm)


def contract_all_gather_ints(comm: Communicator) -> None:
    def numbers(rank: int) -> list[int]:
        return [rank, -rank, 2**62 + rank, -(2**63)]

    assert comm.all_gather_ints(numbers(comm.rank), "ints") == [numbers(r) for r in range(comm.world)]
    assert comm.all_gather_ints([], "ints") == [[]] * comm.world


def contract_agree(comm: Communicator) -> None:
    """One that differs, or has a problem, is an error on every rank; and then they can go on."""
    agree(comm, {"size": 5, "density": 0.1})
    for odd in {0, comm.world - 1} if comm.world > 1 else ():
        with pytest.raises(ValueError, match="disagree on density"):
            agree(comm, {"size": 5, "density": 0.2 if comm.rank == odd else 0.1})
        with pytest.raises(
            ValueError, match="too wet" if comm.rank == odd else f"on rank {comm.global_rank(odd)}: too wet"
        ):
            agree(comm, {"size": 5}, "too wet" if comm.rank == odd else None)
    agree(comm, {"size": 5})


def contract_too_large_is_refused_before_anything_is_sent(comm: Communicator) -> None:
    large, capacity = letter(50), packed_bytes(49)
    attempts: dict[str, Callable[[], object]] = {
        "all_gather": lambda: comm.all_gather(large, capacity, "limit"),
        "all_to_all": lambda: comm.all_to_all([large] * comm.world, capacity, "limit"),
    }
    for name, attempt in attempts.items():
        with pytest.raises(CommError, match=rf"{name} \(limit\).* 58 bytes .* 57"):
            attempt()
    assert_usable(comm)


def contract_operations_do_not_mix(comm: Communicator) -> None:
    """Many small ones in a row, without waiting for each other in between."""
    for turn in range(8):
        mine = letter(turn, comm.rank, turn)
        received = comm.all_to_all([mine] * comm.world, packed_bytes(20), "mix")
        assert_same(received, [letter(turn, r, turn) for r in range(comm.world)])
        x = torch.tensor([float(turn)])
        comm.all_reduce_(x, "mix")
        assert x.item() == turn * comm.world
        told = comm.broadcast(letter(3, turn) if comm.rank == 0 else None, packed_bytes(20), "mix")
        assert_same([told], [letter(3, turn)])
        assert comm.all_gather_ints([turn], "mix") == [[turn]] * comm.world


def contract_too_large_to_broadcast_is_refused(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(CommError, match=r"broadcast \(limit\).* 58 bytes .* 57"):
            comm.broadcast(letter(50), packed_bytes(49), "limit")
    assert_usable(comm)


def contract_receives_may_be_posted_ahead(comm: Communicator) -> None:
    """Receives from one rank get its messages in the order in which they were posted."""
    ahead, behind = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    if comm.world == 1:
        return
    operation, letters = Operation("ahead", "order"), [letter(size, size) for size in (40, 3, 500)]
    receives = [comm.post_recv(packed_bytes(500), behind, operation) for _ in letters]
    sends = [comm.post_send(message, ahead, operation) for message in letters]
    deadline = time.monotonic() + comm.timeout
    assert_same([receive.wait(deadline) for receive in receives], letters)
    for send in sends:
        send.wait(deadline)


def contract_larger_than_its_receive_is_an_error(comm: Communicator) -> None:
    """As the next message may be when one was lost."""
    ahead, behind = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    if comm.world == 1:
        return
    operation, deadline = Operation("recv", "lost"), time.monotonic() + comm.timeout
    receive = comm.post_recv(packed_bytes(10), behind, operation)
    send = comm.post_send(letter(50_000), ahead, operation)
    with pytest.raises(OkTopkError, match=rf"recv \(lost\): .*rank {comm.global_rank(behind)}\b"):
        receive.wait(deadline)
    send.wait(deadline)
    assert_usable(comm)


CONTRACTS: dict[str, Callable[[Communicator], None]] = {
    name.removeprefix("contract_"): value
    for name, value in list(globals().items())
    if name.startswith("contract_")
}


# Waiting in vain.

SILENCED: dict[str, Callable[[Communicator], object]] = {
    "recv": lambda comm: comm.recv(100, 0, "silence"),
    "all_gather": lambda comm: comm.all_gather(letter(9), 100, "silence"),
    "all_to_all": lambda comm: comm.all_to_all([letter(9)] * comm.world, 100, "silence"),
    "broadcast": lambda comm: comm.broadcast(None, 100, "silence"),
    "all_reduce": lambda comm: comm.all_reduce_(torch.ones(3), "silence"),
    "all_reduce, begun before": lambda comm: sum_several(comm),
}


def sum_several(comm: Communicator) -> None:
    for pending in [comm.begin_all_reduce(torch.ones(size), "silence") for size in (3, 300_000)]:
        pending.wait()


def operation_of(name: str) -> str:
    return f"{name.partition(',')[0]} (silence): "


def wait_in_vain(comm: Communicator, name: str) -> tuple[Exception | None, float]:
    """The error, and after how long."""
    start = time.monotonic()
    try:
        SILENCED[name](comm)
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def all_here(done: Path, comm: Communicator) -> None:
    """Wait until all ranks have come as far as this: one that ends is not silent."""
    (done / str(comm.rank)).touch()
    worlds.wait_until(lambda: all((done / str(rank)).exists() for rank in range(comm.world)), 60)
