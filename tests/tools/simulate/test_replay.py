"""The replay on traces made by hand, whose time can be told by hand."""

import pytest

from oktopk.tools.simulate import Network, Prices, Scale, SimulationError, Trace, replay
from oktopk.tools.simulate.trace.format import CONTROL, DECODE, ENCODE, FLUSH, RECEIVE, RING, SEND

NETWORK = Network(latency=2.0, bandwidth=10.0)
FREE = Prices()


def trace(*events: tuple[int, ...]) -> Trace:
    made = Trace()
    for event in events:
        made.add(*event)
    return made


def seconds(*traces: Trace, network: Network = NETWORK, prices: Prices = FREE, factor: float = 1.0) -> float:
    return replay(traces, Scale(factor), network, prices).seconds


def test_one_message_takes_latency_and_its_bytes():
    assert seconds(trace((CONTROL, 1, 50)), trace((RECEIVE, 0))) == pytest.approx(2 + 50 / 10)


def test_a_rank_that_only_sends_goes_on_unless_it_flushes():
    lone = trace((RECEIVE, 0))
    sends = replay([trace((CONTROL, 1, 50)), lone], Scale(1), NETWORK, Prices(after=100.0))
    assert sends.seconds == pytest.approx(7 + 100)  # the receiver is last
    flushed = [trace((CONTROL, 1, 50), (FLUSH, 0), (ENCODE, 1, 0)), lone]
    assert seconds(*flushed, prices=Prices(encode_part=4.0)) == pytest.approx(5 + 4)


def test_messages_of_a_sender_leave_one_after_the_other():
    sender = trace((CONTROL, 1, 50), (CONTROL, 2, 30))
    assert seconds(sender, trace((RECEIVE, 0)), trace()) == pytest.approx(7)
    assert seconds(sender, trace(), trace((RECEIVE, 0))) == pytest.approx(5 + 2 + 3)


def test_messages_to_one_receiver_take_turns_on_its_link():
    receiver = trace((RECEIVE, 1), (RECEIVE, 2))
    assert seconds(receiver, trace((CONTROL, 0, 50)), trace((CONTROL, 0, 30))) == pytest.approx(2 + 5 + 3)


def test_a_link_carries_both_directions_at_once():
    both = [trace((CONTROL, 1 - rank, 50), (RECEIVE, 1 - rank)) for rank in range(2)]
    assert seconds(*both) == pytest.approx(7)


def test_waiting_for_a_late_message_and_not_for_an_early_one():
    late = [trace((ENCODE, 1, 0), (CONTROL, 1, 50)), trace((RECEIVE, 0))]
    assert seconds(*late, prices=Prices(encode_part=3.0)) == pytest.approx(3 + 7)
    early = [trace((CONTROL, 1, 50)), trace((DECODE, 1, 0), (RECEIVE, 0))]
    assert seconds(*early, prices=Prices(decode_part=30.0)) == pytest.approx(30)


def test_messages_between_two_ranks_stay_in_order():
    there = trace((CONTROL, 1, 50), (CONTROL, 1, 20), (RECEIVE, 1))
    back = trace((RECEIVE, 0), (RECEIVE, 0), (CONTROL, 0, 10))
    assert seconds(there, back) == pytest.approx((2 + 5 + 2) + (2 + 1))


def test_latency_counts_for_each_message_and_bandwidth_for_each_byte():
    def chain(network: Network) -> float:
        first = trace((CONTROL, 1, 40))
        middle = trace((RECEIVE, 0), (CONTROL, 2, 40))
        return seconds(first, middle, trace((RECEIVE, 1)), network=network)

    assert chain(Network(0.0, 10.0)) == pytest.approx(8)
    assert chain(Network(3.0, 10.0)) == pytest.approx(8 + 2 * 3)
    assert chain(Network(0.0, 20.0)) == pytest.approx(8 / 2)


def test_work_is_priced_by_parts_and_scaled_entries():
    prices = Prices(before=1.0, after=2.0, encode_part=0.5, encode_entry=0.01, decode_entry=0.1)
    done = replay([trace((ENCODE, 2, 100), (DECODE, 1, 10))], Scale(3.0), NETWORK, prices)
    assert done.seconds == done.work_seconds == pytest.approx(1 + 2 * 0.5 + 300 * 0.01 + 30 * 0.1 + 2)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_ring_takes_2_p_minus_1_rounds(world):
    entries, adding = 60, Prices(add_entry=0.25)
    whole = [trace((RING, entries, 4, 0)) for _ in range(world)]
    chunk = entries / world
    rounds = world - 1
    expected = 2 * rounds * (2 + 4 * chunk / 10) + rounds * chunk * 0.25
    done = replay(whole, Scale(1), NETWORK, adding)
    assert done.seconds == pytest.approx(expected)
    assert done.sent_bytes == pytest.approx(2 * 4 * entries * rounds / world)
    assert done.messages == 2 * rounds


def test_a_ring_of_one_costs_nothing_and_waits_for_the_last():
    assert seconds(trace((RING, 60, 4, 0))) == 0
    late = [trace((ENCODE, 1, 0), (RING, 20, 1, 0)), trace((RING, 20, 1, 0))]
    assert seconds(*late, prices=Prices(encode_part=9.0)) == pytest.approx(9 + 2 * (2 + 1))


def test_control_does_not_grow_with_the_tensor_and_payload_does():
    def sent(factor: float):
        pair = [trace((CONTROL, 1, 80), (SEND, 1, 88 + 60, 1, 10, 1000)), trace((RECEIVE, 0), (RECEIVE, 0))]
        return replay(pair, Scale(factor), NETWORK, FREE)

    assert sent(1.0).control_bytes * 2 == sent(1000.0).control_bytes * 2 == 80
    assert (sent(1.0).sent_bytes - sent(1.0).control_bytes) * 2 == 88 + 60
    assert sent(1000.0).words * 2 == pytest.approx(22 + 2 * 10_000)
    assert 4 * 10_000 < 2 * sent(1000.0).sent_bytes < 8 * 10_000


def test_a_trace_that_waits_for_ever_is_an_error():
    with pytest.raises(SimulationError, match="rank 1 waits"):
        seconds(trace(), trace((RECEIVE, 0)))


def test_overhead_is_paid_for_each_message_while_latency_is_shared():
    everybody = [trace(*((CONTROL, p, 0) for p in range(3) if p != r), *((RECEIVE, p) for p in range(3) if p != r))
                 for r in range(3)]  # fmt: skip
    assert seconds(*everybody, network=Network(2.0, 10.0)) == pytest.approx(2)
    assert seconds(*everybody, network=Network(2.0, 10.0, 0.5)) == pytest.approx(2 * 0.25 + 2 + 2 * 0.25)
    assert seconds(*everybody, network=Network(0.0, 10.0, 0.5)) == pytest.approx(2 * 2 * 0.25)


def test_a_ring_pays_overhead_in_each_of_its_rounds():
    ring = [trace((RING, 30, 4, 0)) for _ in range(3)]
    plain, paid = (replay(ring, Scale(1), Network(2.0, 10.0, overhead), FREE) for overhead in (0.0, 0.5))
    assert paid.seconds == pytest.approx(plain.seconds + 4 * 0.5)
    assert paid.work_seconds == pytest.approx(4 * 0.5)
