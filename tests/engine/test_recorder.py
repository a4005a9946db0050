"""The user's figures: three lists on a trainer, the same for all algorithms, and the density that was promised."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oktopk
from oktopk.engine.autotune import TRIAL
from oktopk.metrics.events import StepEvent
from oktopk.metrics.sinks import MemorySink
from tests.support import stepping
from tests.support.stepping import LAYOUTS, SHAPES, SIZE, SPARSE, gradients, on_ranks, reducer_on

ALGORITHMS = list(oktopk.ALGORITHMS)


def nonzeros(result: stepping.Grads) -> int:
    return sum(int(grad.count_nonzero()) for grad in result.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_step_has_its_three_figures(algorithm: str, layout: str) -> None:
    """One entry per step however many buckets; k is the number of entries of the result."""

    def job(comm: oktopk.Communicator) -> None:
        trainer = SimpleNamespace()
        with reducer_on(comm, algorithm, buckets=LAYOUTS[layout], warmup_steps=2, trainer=trainer) as reducer:
            counts = [nonzeros(reducer.sync(gradients(comm.rank, step))) for step in range(5)]
        dense = [True] * 5 if algorithm == "dense" else [True, True, False, False, False]
        expected = [
            (0.0, 1.0, 4 * SIZE) if is_dense else (1 - k / SIZE, SIZE / k, 8 * k)
            for k, is_dense in zip(counts, dense, strict=True)
        ]
        lists = trainer.sparsities, trainer.compression_ratios, trainer.communication_sizes
        assert list(zip(*lists, strict=True)) == expected

    on_ranks(2, job)


@pytest.mark.parametrize("lost", [False, True])
def test_a_step_counts_every_message_up_to_its_end(lost: bool) -> None:
    """The digests, the names of culprits and the decision of autotune belong to the step that they end."""

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, "oktopk", warmup_steps=0, auto=True) as reducer:
            steps = reducer._engine._steps
            for step in range(4 + TRIAL):
                grads = gradients(comm.rank, step)
                if lost and comm.rank == 1:
                    next(iter(grads.values())).fill_(math.nan)
                reducer.sync(grads)
                assert not steps.meter.traffic
                assert reducer.last is not None
                digests = [operation.phase == "digest" for operation in reducer.last.traffic]
                assert sum(digests) == (reducer.last.phase == "sparse")

    on_ranks(3, job)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operations_add_up_to_the_bytes_of_the_step(algorithm: str, layout: str) -> None:
    """A message that is sent somewhere arrives somewhere, and has a size."""

    def job(comm: oktopk.Communicator) -> list[StepEvent]:
        memory = MemorySink()
        with reducer_on(comm, algorithm, buckets=LAYOUTS[layout], warmup_steps=1, sinks=[memory]) as reducer:
            for step in range(3):
                reducer.sync(gradients(comm.rank, step))
        return memory.steps

    for events in zip(*on_ranks(3, job), strict=True):
        for event in events:
            moved = event.traffic.values()
            assert event.wire.sent_bytes == sum(traffic.sent_bytes for traffic in moved) > 0
            counted = [traffic for traffic in moved if not traffic.modelled]
            assert all(sum(traffic.sizes.values()) == traffic.sent_messages for traffic in counted)
        sent, received = (sum(getattr(e.wire, f"{way}_bytes") for e in events) for way in ("sent", "received"))
        assert sent == received


@pytest.mark.parametrize("algorithm", SPARSE)
def test_nothing_to_send_is_no_division_by_zero(algorithm: str) -> None:
    def job(comm: oktopk.Communicator) -> tuple[list[float], list[float], list[float]]:
        trainer = SimpleNamespace()
        with reducer_on(comm, algorithm, warmup_steps=0, trainer=trainer) as reducer:
            for _ in range(2):
                reducer.sync({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        return trainer.sparsities, trainer.compression_ratios, trainer.communication_sizes

    assert on_ranks(2, job) == [([1.0, 1.0], [1.0, 1.0], [0, 0])] * 2


def test_lists_may_be_reset_between_steps() -> None:
    trainer = SimpleNamespace()
    with reducer_on(None, trainer=trainer) as reducer:
        for step in range(6):
            if step == 4:
                trainer.sparsities, trainer.compression_ratios, trainer.communication_sizes = [], [], []
            reducer.sync(gradients(0, step))
    lengths = [len(trainer.sparsities), len(trainer.compression_ratios), len(trainer.communication_sizes)]
    assert lengths == [2, 2, 2]


def test_linking_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Without a trainer a debug line says so; with one, the first metric is logged, once."""
    with caplog.at_level(logging.DEBUG, logger="oktopk"):
        reducer_on(None).close()
        assert [r.levelno for r in caplog.records if "no trainer is linked" in r.getMessage()] == [logging.DEBUG]
        caplog.clear()
        with reducer_on(None, trainer=SimpleNamespace()) as reducer:
            for step in range(4):
                reducer.sync(gradients(0, step))
    first = [record.getMessage() for record in caplog.records if "recording metrics on" in record.getMessage()]
    assert len(first) == 1
    assert "step 0 (dense) has sparsity 0.000000" in first[0]


@pytest.mark.parametrize("algorithm", SPARSE)
def test_payload_stands_beside_what_was_measured(algorithm: str) -> None:
    """Densities: asked for, sent by this rank, and of the result, which may have up to P times as much."""
    for step in stepping.run_steps(3, 5, algorithm=algorithm)[2:]:
        k = int(0.05 * SIZE)
        for record in step:
            event, count = record.event, nonzeros(record.result)
            assert event.target_density == k / SIZE
            assert event.global_density == count / SIZE
            assert event.volume.payload_bytes == 8 * count
            low, high = oktopk.ALGORITHMS[algorithm].band
            assert low * k <= event.local_count <= high * k
            assert event.local_density == event.local_count / SIZE
            assert count <= 3 * high * k
            assert event.wire.sent_bytes > 0


def test_every_bucket_has_its_own_event() -> None:
    sink = MemorySink()

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, buckets=stepping.SEVERAL, sinks=[sink] if comm.rank == 0 else []) as reducer:
            for step in range(4):
                reducer.sync(gradients(comm.rank, step))

    on_ranks(2, job)
    assert [event.step for event in sink.steps] == [0, 1, 2, 3]
    assert [(part.step, part.bucket) for part in sink.reductions] == [(t, b) for t in range(4) for b in range(3)]
    assert [part.algorithm for part in sink.steps[1].reductions] == ["dense"] * 3
    assert [part.algorithm for part in sink.steps[2].reductions] == ["oktopk"] * 3
    for event in sink.steps:
        assert event.volume.size == sum(part.volume.size for part in event.reductions) == SIZE


# The density warning.


def densities_told(
    caplog: pytest.LogCaptureFixture, algorithm: str, edit: Any = None, **options: Any
) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="oktopk"):
        stepping.run_steps(2, 6, edit, algorithm, **options)
    return sorted(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_warning_inside_the_band(algorithm: str, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    assert densities_told(caplog, algorithm, buckets=LAYOUTS[layout]) == []


@pytest.mark.parametrize("algorithm", SPARSE)
def test_a_warning_when_a_rank_has_too_little_to_send(algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    """Only three entries of rank 1 are not zero: it says so, once, and the other one does not."""

    def edit(rank: int, step: int, grads: stepping.Grads) -> None:
        if rank == 1:
            for name, grad in grads.items():
                grad.mul_(name == "d")

    (message,) = densities_told(caplog, algorithm, edit, warmup_steps=0)
    assert message == "step 0: rank 1 sent 0.923 % of bucket 0 instead of 4.92 % (fewer entries are not zero)"


@pytest.mark.parametrize(("low", "high", "warns"), [(0.75, 1.25, False), (0.0, 0.9, True), (1.1, 2.0, True)])
def test_the_band_is_that_of_the_algorithm(
    low: float, high: float, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oktopk.ALGORITHMS["topka"], "band", (low, high))
    told = densities_told(caplog, "topka", warmup_steps=3)
    assert len(told) == (2 if warns else 0)
    assert all(message.startswith("step 3: rank ") for message in told)
