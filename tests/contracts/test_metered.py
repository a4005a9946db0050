"""The meter counts what travels, to the byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk import CommError, Communicator, Metered, Traffic, run_threads
from oktopk.comm import Operation, PendingSum, agree, alone, pack, packed_bytes, total
from oktopk.metrics.traffic import Stopwatch
from tests.support import worlds

HEADER = packed_bytes(0)
SIZES = pytest.mark.parametrize("size", worlds.SIZES)


def letter(payload: int) -> Tensor:
    return pack(torch.zeros(payload, dtype=torch.uint8))


def metered(size: int, job: Callable[[Metered], object]) -> list[dict[Operation, Traffic]]:
    """What the meter of each rank saw."""

    def run(comm: Communicator) -> dict[Operation, Traffic]:
        meter = Metered(comm)
        job(meter)
        return meter.pop_traffic()

    return run_threads(size, run)


def only(traffic: dict[Operation, Traffic], operation: Operation) -> Traffic:
    assert list(traffic) == [operation]
    return traffic[operation]


def counts(traffic: Traffic) -> tuple[int, int, int, int]:
    return traffic.sent_messages, traffic.received_messages, traffic.sent_bytes, traffic.received_bytes


def gathered_bytes(size: int, message: int) -> int:
    """What a rank sends in Bruck's all-gather of equal messages: a batch travels in an envelope of its own."""
    sent, held = 0, 1
    while held < size:
        batch = min(held, size - held)
        sent += message if batch == 1 else packed_bytes(batch * message)
        held += batch
    return sent


@SIZES
def test_all_gather_sends_log_p_messages(size: int) -> None:
    message = letter(92)
    ranks = metered(size, lambda comm: comm.all_gather(message, 500, "gather"))
    rounds, sent = math.ceil(math.log2(size)), gathered_bytes(size, message.numel())
    for traffic in ranks:
        assert counts(only(traffic, Operation("all_gather", "gather"))) == (rounds, rounds, sent, sent)


@SIZES
def test_a_ragged_all_gather_receives_what_was_sent(size: int) -> None:
    """And every rank receives each message of the others exactly once, besides the envelopes."""
    ranks = metered(size, lambda comm: comm.all_gather(letter(10 * comm.rank), 500, "gather"))
    moved = [only(traffic, Operation("all_gather", "gather")) for traffic in ranks]
    assert sum(t.sent_bytes for t in moved) == sum(t.received_bytes for t in moved)
    everything = sum(letter(10 * rank).numel() for rank in range(size))
    envelopes = gathered_bytes(size, 0)
    for rank, traffic in enumerate(moved):
        assert traffic.received_bytes == everything - letter(10 * rank).numel() + envelopes


@SIZES
def test_an_exchange_sends_one_message_to_each_peer(size: int) -> None:
    def job(comm: Metered) -> None:
        comm.all_to_all([letter(100 * comm.rank + to) for to in range(size)], 2000, "split")

    for rank, traffic in enumerate(metered(size, job)):
        others = [r for r in range(size) if r != rank]
        sent = sum(HEADER + 100 * rank + to for to in others)
        received = sum(HEADER + 100 * source + rank for source in others)
        moved = traffic[Operation("all_to_all", "split")]
        assert counts(moved) == (size - 1, size - 1, sent, received)


@SIZES
def test_a_message_that_is_left_out_costs_nothing(size: int) -> None:
    def job(comm: Metered) -> None:
        """Only rank 0 says something, to all others."""
        outgoing = [letter(4) if comm.rank == 0 else None for _ in range(size)]
        sources = [source == 0 for source in range(size)]
        list(comm.exchange(outgoing, 100, "balance", sources=sources))

    first, *others = [total(traffic) for traffic in metered(size, job)]
    assert counts(first) == (size - 1, 0, (size - 1) * (HEADER + 4), 0)
    for traffic in others:
        assert counts(traffic) == (0, 1, 0, HEADER + 4)


@SIZES
def test_a_broadcast_is_one_message_for_each_other_rank(size: int) -> None:
    message = letter(33)
    ranks = metered(size, lambda comm: comm.broadcast(message if comm.rank == 0 else None, 100, "tree"))
    moved = [only(traffic, Operation("broadcast", "tree")) for traffic in ranks]
    assert sum(t.sent_messages for t in moved) == size - 1
    assert sum(t.sent_bytes for t in moved) == (size - 1) * message.numel()
    assert [t.received_messages for t in moved] == [0] + [1] * (size - 1)
    assert max(t.sent_messages for t in moved) == math.ceil(math.log2(size))


def test_send_and_receive_are_counted_where_they_happen() -> None:
    def job(comm: Metered) -> None:
        if comm.rank == 0:
            comm.send(letter(5), 1, "tree")
        else:
            comm.recv(100, 0, "tree")

    sender, receiver = metered(2, job)
    assert counts(only(sender, Operation("send", "tree"))) == (1, 0, HEADER + 5, 0)
    assert counts(only(receiver, Operation("recv", "tree"))) == (0, 1, 0, HEADER + 5)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_an_all_reduce_is_modelled_as_a_ring(size: int, dtype: torch.dtype) -> None:
    x = torch.zeros(1000, dtype=dtype)
    moved = 2 * x.numel() * x.element_size() * (size - 1) // size
    for traffic in metered(size, lambda comm: comm.all_reduce_(x.clone(), "dense")):
        seen = only(traffic, Operation("all_reduce", "dense"))
        assert seen.modelled
        assert counts(seen) == (2 * (size - 1), 2 * (size - 1), moved, moved)
        assert sum(seen.sizes.values()) == seen.sent_messages


@SIZES
def test_a_sum_under_way_is_counted_when_it_was_waited_for(size: int) -> None:
    """As all_reduce_ counts it, under its own operation; the stopwatch of the moment gets the time of the wait."""
    x = torch.zeros(1000)

    def job(comm: Communicator) -> None:
        meter, whole = Metered(comm), Metered(comm)
        whole.all_reduce_(x.clone(), "dense")
        pending = [meter.begin_all_reduce(x.clone(), "dense", control=control) for control in (False, True)]
        assert meter.traffic == {}
        for sum_, control in zip(pending, (False, True), strict=True):
            meter.stopwatch = Stopwatch()
            sum_.wait()
            seen = only(meter.pop_traffic(), Operation("all_reduce", "dense", control))
            assert counts(seen) == counts(whole.payload())
            assert seen.modelled
            assert [span.name for span in meter.stopwatch.spans] == ["exchange"]
            assert 0 < meter.stopwatch.seconds("exchange") <= seen.seconds

    run_threads(size, job)


def test_a_sum_that_fails_is_not_counted() -> None:
    class Failing(Metered):
        def begin_all_reduce(self, x: Tensor, phase: str, *, control: bool = False) -> PendingSum:
            return self

        def wait(self) -> None:
            raise CommError("gone")

    meter = Metered(Failing(alone()))
    with pytest.raises(CommError, match="gone"):
        meter.begin_all_reduce(torch.ones(3), "dense").wait()
    assert meter.payload().sent_bytes == 0
    assert not meter.payload().modelled


def every_operation(comm: Metered) -> dict[Operation, Traffic]:
    """One of each kind, payload and control, with messages of many sizes."""
    world, rank = comm.world, comm.rank
    comm.all_gather(letter(50 + 7 * rank), 500, "gather")
    comm.all_to_all([letter(2**to) for to in range(world)], 2000, "split")
    outgoing = [letter(9) if (rank + to) % 2 else None for to in range(world)]
    sources = [(source + rank) % 2 == 1 for source in range(world)]
    list(comm.exchange(outgoing, 100, "balance", sources=sources))
    comm.broadcast(letter(3) if rank == 0 else None, 100, "tree")
    comm.all_reduce_(torch.ones(10), "dense")
    comm.all_gather_ints([1, 2, 3], "counts")
    comm.all_reduce_(torch.ones(4, dtype=torch.int64), "regions", control=True)
    agree(comm, {"size": 5})
    return comm.pop_traffic()


@SIZES
def test_control_is_counted_apart_from_payload(size: int) -> None:
    def job(comm: Communicator) -> None:
        meter = Metered(comm)
        meter.all_gather(letter(20), 500, "gather")
        payload = counts(meter.payload())
        assert counts(meter.control()) == (0, 0, 0, 0)
        meter.all_gather_ints([1, 2], "counts")
        meter.all_gather(letter(20), 500, "gather", control=True)
        meter.all_reduce_(torch.ones(9), "regions", control=True)
        agree(meter, {"size": 5})
        assert counts(meter.payload()) == payload
        everything = counts(total(meter.traffic))
        assert counts(meter.payload() + meter.control()) == everything
        assert (counts(meter.control())[0] > 0) == (size > 1)

    run_threads(size, job)


@SIZES
def test_every_message_has_its_size_on_record(size: int) -> None:
    for traffic in metered(size, lambda comm: comm.traffic.update(every_operation(comm))):
        for seen in traffic.values():
            if not seen.modelled:
                assert sum(seen.sizes.values()) == seen.sent_messages
                lowest = sum(2**power * count for power, count in seen.sizes.items())
                assert lowest <= seen.sent_bytes <= 2 * lowest


@pytest.mark.parametrize("payload", [0, 7, 8, 55, 56, 57, 1015, 1016])
def test_sizes_are_sorted_by_powers_of_two(payload: int) -> None:
    def job(comm: Metered) -> None:
        comm.all_to_all([letter(payload)] * 2, 2000, "split")

    for traffic in metered(2, job):
        assert total(traffic).sizes == {int(math.log2(HEADER + payload)): 1}


def test_what_is_taken_is_gone() -> None:
    def job(comm: Communicator) -> None:
        meter = Metered(comm)
        meter.all_gather(letter(20), 500, "gather")
        first = meter.pop_traffic()
        assert meter.traffic == {}
        assert counts(meter.payload()) == counts(meter.control()) == (0, 0, 0, 0)
        meter.all_gather(letter(20), 500, "gather")
        assert {o: counts(t) for o, t in meter.pop_traffic().items()} == {o: counts(t) for o, t in first.items()}

    run_threads(3, job)


@SIZES
def test_every_operation_takes_time(size: int) -> None:
    def seconds(comm: Communicator) -> list[float]:
        return [traffic.seconds for traffic in every_operation(Metered(comm)).values()]

    for taken in run_threads(size, seconds):
        assert len(taken) == 8
        assert all(0 < time < 60 for time in taken)


@SIZES
def test_a_meter_around_a_meter(size: int) -> None:
    """sparse_allreduce meters what it is given: one who gives it a meter still sees everything in that."""

    def job(comm: Communicator) -> None:
        inner = Metered(comm)
        outer = every_operation(Metered(inner))
        assert {o: counts(t) for o, t in inner.traffic.items()} == {o: counts(t) for o, t in outer.items()}
        for operation, traffic in inner.traffic.items():
            assert 0 < traffic.seconds <= outer[operation].seconds, f"{operation} took {traffic}"

    run_threads(size, job)


def test_traffic_adds_up() -> None:
    one = Traffic(1, 2, 3, 4, 0.5, False, {3: 1, 5: 2})
    other = Traffic(10, 20, 30, 40, 0.25, True, {5: 1, 6: 1})
    assert one + other == other + one == Traffic(11, 22, 33, 44, 0.75, True, {3: 1, 5: 3, 6: 1})
    assert one + Traffic() == one
    assert one.sizes == {3: 1, 5: 2}


def count_all(connect: Callable[..., Communicator], options: dict[str, Any]) -> dict[Operation, tuple[int, ...]]:
    inner = Metered(connect(**options))
    outer = {operation: counts(traffic) for operation, traffic in every_operation(Metered(inner)).items()}
    assert outer == {operation: counts(traffic) for operation, traffic in inner.traffic.items()}
    return outer


@pytest.mark.processes
def test_gloo_counts_the_same_as_threads() -> None:
    on_threads = run_threads(3, lambda comm: count_all(lambda: comm, {}))
    assert worlds.run("gloo", 3, count_all, {"timeout": 60.0}) == on_threads
