"""What a person sees: true figures with their units, and nothing that was not measured."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest

from oktopk.train.config.plan import Plan
from oktopk.train.console import (
    EXPLANATIONS,
    format_phase,
    format_summary,
    log_epoch,
    log_transition,
    log_validation,
)
from oktopk.train.metrics import REDUCER_COLUMNS, SECONDS, EpochMetrics, PhaseMetrics, RankMetrics, StepMetrics

DENSE = {
    "sparsity": 0.0,
    "compression_ratio": 1.0,
    "payload_bytes": 110_278_272,
    "target_density": 1.0,
    "local_density": 1.0,
    "global_density": 1.0,
    "sent_bytes": 110_278_272,
    "received_bytes": 110_278_272,
    "hidden_share": 0.25,
}
PLAN = Plan(14, 10, None, 128, "oktopk", 0.01, 27_569_568, world=2)
SPARSE = {
    "sparsity": 0.99,
    "compression_ratio": 100.0,
    "payload_bytes": 2_205_568,
    "target_density": 0.01,
    "local_density": 0.0101,
    "global_density": 0.0099,
    "sent_bytes": 3_308_352,
    "received_bytes": 3_308_352,
    "hidden_share": 0.5,
}


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oktopk")


def phases(dense: int = 0, sparse: int = 0) -> PhaseMetrics:
    found = PhaseMetrics()
    for step in range(dense + sparse):
        name, row = ("dense", DENSE) if step < dense else ("sparse", SPARSE)
        seconds = dict.fromkeys(SECONDS, 0.02)
        found.add(StepMetrics(step, 0, 0.01, name, 3.0, 16, skipped=step == 1, **seconds), row)
    return found


def epoch(of: PhaseMetrics) -> EpochMetrics:
    ranks = [
        RankMetrics(0.030, 0.0015, 0.010, 0.050, 2 * 10**9, 0),
        RankMetrics(0.050, 0.0015, 0.010, 0.070, 10**9, 0),
    ]
    return EpochMetrics.of(4, 0.01, of, ranks)


def test_17_an_epoch_has_its_loss_times_memory_and_slowest_rank(caplog: pytest.LogCaptureFixture) -> None:
    log_epoch(epoch(phases(dense=2, sparse=3)), 0.009901, PLAN)
    first, second, dense, sparse = caplog.messages
    assert first == "epoch 4: loss 3.0000, 5 steps, 1 of them skipped, 800.0 samples/s, lr 0.01, then 0.009901"
    for part in ("a step: 70 ms", "forward+backward 40 ms", "data 1.5 ms", "exposed communication 10.0 ms"):
        assert part in second
    assert "memory 2.00 GB; slowest: rank 1 (1.25 of the mean)" in second
    assert "GPU" not in second
    assert dense.startswith("  dense: 2 steps, ")
    assert sparse.startswith("  sparse: 3 steps, ")
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_10_a_phase_has_a_line_of_its_own_with_units() -> None:
    rows = phases(dense=2, sparse=3).rows()
    assert format_phase("dense", rows["dense"], PLAN) == (
        "dense: 2 steps, sparsity 0.0000, compression ratio 1.00, communication size 110,278,272 bytes, "
        "density 1, sent 110.278 MB per rank and step, 100 % of a dense step's"
    )
    assert format_phase("sparse", rows["sparse"], PLAN) == (
        "sparse: 3 steps, sparsity 0.9900, compression ratio 100.00, communication size 2,205,568 bytes, "
        "density 0.0101 (asked for 0.01, target 0.01, result 0.0099), sent 3.308 MB per rank and step, "
        "3 % of a dense step's"
    )


def test_one_rank_has_no_dense_bytes_to_compare_with() -> None:
    rows = phases(sparse=3).rows()
    assert "of a dense step" not in format_phase("sparse", rows["sparse"], replace(PLAN, world=1))


def test_5_an_epoch_without_steps_is_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    log_epoch(epoch(PhaseMetrics()), 0.01, PLAN)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.DEBUG, "epoch 4 has no steps to average")
    ]


def test_12_an_epoch_of_skipped_steps_has_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    found = PhaseMetrics()
    found.add(StepMetrics(0, 0, 0.01, "dense", None, 0, skipped=True), DENSE)
    log_epoch(epoch(found), 0.01, PLAN)
    assert caplog.messages[0].startswith("epoch 4: no finite loss, 1 steps, 1 of them skipped")
    assert not any("nan" in message for message in caplog.messages)


def test_the_gpus_memory_is_shown_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    log_epoch(replace(epoch(phases(dense=2)), gpu_bytes=3 * 10**9), 0.01, PLAN)
    assert "memory 2.00 GB, 3.00 GB on the GPU; slowest" in caplog.text


def test_10_the_transition_names_step_epoch_and_density(caplog: pytest.LogCaptureFixture) -> None:
    log_transition(StepMetrics(128, 9, 0.01, "sparse"), Plan(14, 10, None, 128, "oktopk", 0.01, 1000, 8), 0.009999)
    assert caplog.messages == ["step 128 (epoch 9): the sparse phase starts, oktopk at density 0.01"]


def test_10_a_density_that_falls_is_shown_beside_the_one_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    log_transition(StepMetrics(128, 9, 0.01, "sparse"), replace(PLAN, ramp_steps=50), 0.25)
    assert caplog.messages[0].endswith("oktopk at density 0.01; it falls from 0.25 over 50 steps")


def test_14_a_validation_shows_what_the_task_has_measured_and_no_accuracy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figures = {"val loss": 2.5, "val WER": 1.0625, "val CER": 0.5}
    log_validation(4, figures, ['said "GO", heard "NO"', 'said "YES", heard ""'])
    assert caplog.messages == [
        "epoch 4: val loss 2.5000, val WER 1.0625, val CER 0.5000",
        '  said "GO", heard "NO"',
        '  said "YES", heard ""',
    ]
    assert "acc" not in caplog.text


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({}, "epoch 0: no validation data"),
        ({"val loss": math.nan, "val WER": math.inf}, "epoch 0: val loss not finite, val WER not finite"),
    ],
)
def test_5_a_validation_never_shows_nan(
    caplog: pytest.LogCaptureFixture, figures: dict[str, float], said: str
) -> None:
    log_validation(0, figures, ())
    assert caplog.messages == [said]


def table(of: PhaseMetrics) -> dict[str, list[str]]:
    rows = format_summary(of.rows(), PLAN).splitlines()[: -len(EXPLANATIONS.splitlines())]
    assert len({len(line) for line in rows}) == 1
    return {line[:31].strip(): line[31:].split() for line in rows}


def test_words_that_need_it_are_explained_below_the_table() -> None:
    below = format_summary(phases(sparse=1).rows(), PLAN).splitlines()[-4:]
    assert [line.partition(":")[0] for line in below[:3]] == ["exposed", "compression ratio", "target density"]
    assert "hidden: it ran during backward" in below[0]


def test_the_table_at_the_end_has_the_phases_side_by_side() -> None:
    cells = table(phases(dense=2, sparse=3))
    expected: dict[str, list[Any]] = {
        "mean per step": ["dense", "sparse"],
        "steps": ["2", "3"],
        "skipped steps": ["1", "0"],
        "mean loss": ["3.0000", "3.0000"],
        "step, ms": ["20.0", "20.0"],
        "sparsity": ["0.0000", "0.9900"],
        "compression ratio": ["1.00", "100.00"],
        "communication size, bytes": ["110,278,272", "2,205,568"],
        "sent by rank 0, bytes": ["110,278,272", "3,308,352"],
        "of a dense step's bytes, %": ["100", "3"],
        "density asked for": ["1", "0.01"],
        "target density": ["1", "0.01"],
        "density sent": ["1", "0.0101"],
        "density of the result": ["1", "0.0099"],
        "hidden share of communication": ["0.25", "0.50"],
    }
    assert {label: cells[label] for label in expected} == expected


def test_the_table_has_only_phases_that_were_there() -> None:
    assert table(phases(dense=2))["mean per step"] == ["dense"]
    skipped = PhaseMetrics()
    skipped.add(StepMetrics(0, 0, 0.01, "dense", None, 0, skipped=True), dict.fromkeys(REDUCER_COLUMNS, 1.0))
    assert table(skipped)["mean loss"] == ["–"]
