"""What is recorded is what the algorithms do, and a changed algorithm gives another answer."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from oktopk.algorithms import ALGORITHMS, Algorithm, OkTopk, Reduction, TopkA, find_algorithm
from oktopk.comm import Metered, run_threads
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.simulate import Network, Prices, RecordingCommunicator, Scale, bounds, record, replay
from oktopk.tools.simulate.measure.costs import Costs, Step
from oktopk.tools.simulate.study import Question, choose_recorded_size, replay_recording
from oktopk.tools.simulate.trace.format import CONTROL, ENCODE, SEND, parts_of
from oktopk.tools.simulate.trace.record import RankReducer, rank_gradients
from oktopk.wire.sparse_comm import SparseCommunicator

NETWORK = Network(50e-6, 1.25e9)
DENSITY = 0.05


def replayed(algorithm: Algorithm, world: int, factor: float = 1.0, size: int = 20_000):
    found = record(algorithm, world, Gradients(size, 0), DENSITY, skipped=2, steady=1)
    return replay(found.steady[0], Scale(factor), NETWORK, Prices())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_bytes_and_messages_are_what_the_meter_counts(name, world):
    size, steps = 3000, 4
    drawn = Gradients(size, 0)

    def metered(comm):
        meter = Metered(comm)
        reducing = RankReducer(meter, find_algorithm(name), rank_gradients(drawn, comm.rank), DENSITY)
        reducing.age(8)
        for step in range(8, 8 + steps):
            meter.pop_traffic()
            reducing.prepare(step)
            reducing.reduce(step)
        both = meter.payload() + meter.control()
        return both.sent_bytes, both.sent_messages, meter.control().sent_bytes

    counted = torch.tensor(run_threads(world, metered), dtype=torch.float64).mean(0).tolist()
    found = record(find_algorithm(name), world, drawn, DENSITY, skipped=2, steady=1)
    done = replay(found.steady[0], Scale(1), NETWORK, Prices())
    assert done.sent_bytes == pytest.approx(counted[0], abs=8)  # the meter rounds the bytes of a ring
    assert done.messages == counted[1]
    assert done.control_bytes == pytest.approx(counted[2], abs=8)
    assert (done.seconds > 0) == (world > 1)


def test_every_entry_that_is_sent_is_seen():
    found = record(TopkA(), 3, Gradients(4000, 0), DENSITY, skipped=0, steady=1)
    for trace in found.steady[0]:
        sends = [event for event in trace.events() if event[0] == SEND]
        assert [(parts, entries, span) for *_, parts, entries, span in sends] == [(1, 200, 4000)] * 2
    assert not [event for trace in found.first for event in trace.events() if event[0] == CONTROL]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_message_that_is_passed_on_is_encoded_once(world):
    """TopkA's all-gather sends it in every round."""
    found = record(TopkA(), world, Gradients(3000, 0), DENSITY, skipped=0, steady=1)
    for trace in found.steady[0]:
        encoded = [numbers[:2] for kind, *numbers in trace.events() if kind == ENCODE]
        assert [sum(column) for column in zip(*encoded, strict=True)] == [1, found.k]


def test_what_is_not_in_the_wire_format_has_no_parts():
    assert parts_of(torch.zeros(500, dtype=torch.uint8)) == []


@dataclass(frozen=True)
class Twice(TopkA):
    """Sends everything twice."""

    name: ClassVar[str] = "topka"

    def reduce(self, channel: SparseCommunicator, acc, k: int, state) -> Reduction:
        super().reduce(channel, acc, k, state)
        return super().reduce(channel, acc, k, state)


@pytest.mark.parametrize("world", [2, 3])
def test_a_changed_algorithm_changes_the_answer(world):
    once, twice = replayed(TopkA(), world), replayed(Twice(), world)
    assert twice.sent_bytes == pytest.approx(2 * once.sent_bytes)
    assert twice.messages == 2 * once.messages
    assert twice.seconds == pytest.approx(2 * once.seconds, rel=0.01)


@pytest.mark.parametrize("world", [2, 5, 8, 32])
def test_words_of_oktopk_stay_below_the_bound_and_those_of_topka_grow(world):
    factor, size = 100, 20_000
    k = size * DENSITY * factor
    limit = bounds(world, size * factor, k)
    assert limit.sparse < replayed(OkTopk(), world, factor).words < limit.oktopk
    assert replayed(TopkA(), world, factor).words == pytest.approx(2 * k * (world - 1), rel=0.01)


@pytest.mark.parametrize("name", ["topka", "oktopk", "topkdsa"])
def test_a_small_recording_scaled_up_is_like_a_large_one(name):
    small = replayed(find_algorithm(name), 3, factor=8.0, size=20_000)
    large = replayed(find_algorithm(name), 3, factor=1.0, size=160_000)
    assert small.words == pytest.approx(large.words, rel=0.1)
    assert small.sent_bytes == pytest.approx(large.sent_bytes, rel=0.1)
    assert small.seconds == pytest.approx(large.seconds, rel=0.15)


def test_ranks_have_gradients_of_their_own_that_share_a_mean():
    drawn = Gradients(2000, 0)
    one, other = (rank_gradients(drawn, rank).at(5).clone() for rank in (1, 2))
    assert not torch.equal(one, other)
    assert torch.equal(one, rank_gradients(drawn, 1).at(5))
    assert torch.corrcoef(torch.stack([one, other]))[0, 1] > 0.02


def test_what_goes_through_the_recorder_arrives():
    def rank(comm):
        recorded, total = RecordingCommunicator(comm), torch.tensor([float(comm.rank)])
        recorded.all_reduce_(total, "sum")
        return total.item(), recorded.all_gather_ints([comm.rank], "ranks")

    assert run_threads(3, rank, in_turns=True) == [(3.0, [[0], [1], [2]])] * 3


def test_ranks_that_take_turns_end_when_one_of_them_fails():
    def rank(comm):
        comm.all_gather_ints([comm.rank], "before")
        if comm.rank == 1:
            raise RuntimeError("no more")
        comm.all_gather_ints([comm.rank], "after")

    with pytest.raises(RuntimeError, match="no more"):
        run_threads(5, rank, in_turns=True)


def question(ranks: int, size: int, density: float = 0.01) -> Question:
    return Question([ranks], ["topka"], size, density, NETWORK)


def test_the_recorded_tensor_is_no_larger_than_asked_and_fits_in_memory():
    assert choose_recorded_size(OkTopk(), 4, question(4, 1000)) == 1000
    assert choose_recorded_size(OkTopk(), 4, question(4, 25_000_000)) == pytest.approx(410_000)
    for algorithm in (TopkA(), OkTopk()):
        size = choose_recorded_size(algorithm, 1024, question(1024, 25_000_000))
        assert 100 <= size <= (2 << 30) / 8 / 1024
    assert choose_recorded_size(TopkA(), 256, question(256, 10**7)) < choose_recorded_size(
        OkTopk(), 256, question(256, 10**7)
    )


def test_exact_steps_have_their_share():
    algorithm = OkTopk(tau_prime=4)
    costs = Costs(1, 1, {"oktopk": Step(5.0, 0.0)}, {"oktopk": Step(1.0, 0.0)}, Prices())
    found = record(algorithm, 2, Gradients(1000, 0), 0.1, skipped=2, steady=1)
    one = replay_recording(algorithm, found, Question([2], ["oktopk"], 1000, 0.1, Network(0.0, math.inf)), costs)
    assert one.exact_seconds == pytest.approx(5000)
    assert one.step.seconds == pytest.approx(0.75 * 1000 + 0.25 * 5000)
