"""Work is priced in the same way where it is measured and where it is replayed, so that nothing counts twice."""

from dataclasses import replace

import pytest
import torch

from oktopk.algorithms import ALGORITHMS, OkTopk, TopkA, find_algorithm
from oktopk.comm import Communicator, Operation, run_threads
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.simulate import Costs, Network, Prices, Scale, record, replay
from oktopk.tools.simulate.measure import timing
from oktopk.tools.simulate.measure.timing import StepCost, time_ranks, time_step
from oktopk.tools.simulate.trace.format import ADD
from oktopk.tools.simulate.trace.processor import ProcessorWatch, TransportTimer

NO_NETWORK = Network(0.0, float("inf"))
CODING = Prices(
    encode_part=1e-3, encode_entry=2e-6, decode_part=3e-3, decode_entry=5e-6, scatter_entry=7e-6, add_entry=0.0
)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_what_is_taken_off_a_measured_step_is_what_its_replay_adds(name, world):
    found = record(find_algorithm(name), world, Gradients(4000, 0), 0.05, skipped=0, steady=1)
    taken_off = [timing.price_work(trace, CODING) for trace in found.steady[0]]
    replayed = replay(found.steady[0], Scale(1), NO_NETWORK, CODING)
    assert replayed.work_seconds == pytest.approx(sum(taken_off) / world)
    assert (replayed.work_seconds > 0) == (name != "dense")


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_entry_of_the_result_is_added_up_once(world):
    found = record(TopkA(), world, Gradients(4000, 0), 0.05, skipped=0, steady=1)
    for trace in found.steady[0]:
        assert sum(event[2] for event in trace.events() if event[0] == ADD) == world * found.k


def test_a_step_is_taken_apart_into_what_grows_and_what_does_not(monkeypatch):
    """And put together again by the prices, for any size and number of parts."""
    fixed, part, before, after = 3e-3, 2e-4, 5e-9, 7e-9

    def known(algorithm, world, drawn, density, coding):
        size, parts = drawn.buffer.numel(), 2 * (world - 1)
        return StepCost(fixed / 3 + before * size, fixed * 2 / 3 + part * parts + after * size, parts)

    monkeypatch.setattr(timing, "time_ranks", known)
    step = time_step(OkTopk(), Gradients(1 << 20, 0), 0.01, CODING)
    assert (step.before, step.after) == pytest.approx((before, after), rel=0.01)
    assert step.part == pytest.approx(part)
    assert step.fixed == pytest.approx(fixed, rel=0.02)
    prices = Costs(1 << 20, 1, {}, {"oktopk": step}, CODING).prices("oktopk", 10**8)
    assert prices.before + prices.after == pytest.approx(fixed + 10**8 * (before + after), rel=0.01)
    assert prices.decode_part == pytest.approx(CODING.decode_part + part)
    assert replace(prices, before=0.0, after=0.0, decode_part=CODING.decode_part) == CODING


@pytest.mark.parametrize("name", ["dense", "topka", "oktopk"])
@pytest.mark.parametrize("world", [1, 3])
def test_ranks_are_timed_with_the_parts_they_receive(name, world):
    found = time_ranks(find_algorithm(name), world, Gradients(4000, 0), 0.05, Prices())
    assert found.parts == (world - 1) * {"dense": 0, "topka": 1, "oktopk": 2}[name]
    assert (found.select > 0) == (name != "dense")
    assert found.rest > 0


class Clock:
    """Stands still unless somebody works."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now


class Slow(Communicator):
    """A transport whose every operation takes some time of the processor."""

    def __init__(self, inner: Communicator, clock: Clock) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.clock = inner, clock

    def post_send(self, message, peer, operation):
        self.clock.now += 1
        return self.inner.post_send(message, peer, operation)

    def post_recv(self, capacity, peer, operation):
        self.clock.now += 10
        return self.inner.post_recv(capacity, peer, operation)

    def all_reduce_(self, x, phase, *, control=False):
        self.clock.now += 100
        self.inner.all_reduce_(x, phase, control=control)


def test_the_time_of_the_transport_is_apart_from_that_of_the_rank(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("oktopk.tools.simulate.trace.processor.time", clock)

    def rank(comm):
        outside, watch = TransportTimer(Slow(comm, clock)), ProcessorWatch()
        with watch.stage("select"):
            clock.now += 1000
        outside.all_reduce_(torch.ones(3), "sum")
        sending = outside.post_send(torch.zeros(8, dtype=torch.uint8), 0, Operation("send", "there"))
        sending.wait(0.0)
        clock.now += 1000
        return outside.take(), outside.take(), watch.seconds("select")

    assert run_threads(1, rank) == [(101, 0, 1000)]
