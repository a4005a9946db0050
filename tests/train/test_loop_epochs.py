"""The end of an epoch: figures over all ranks, validation, the learning rate, and one model on all ranks."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from signal import Signals

import pytest
import torch

from oktopk.train.checkpoint.replicas import ReplicaError
from oktopk.train.metrics import REDUCER_COLUMNS, EpochMetrics, PhaseMetrics, RankMetrics, StepMetrics
from tests.support.train.runs import BATCH, Batch, Recipe, Regression, Runs, buffers


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def test_15_validation_ends_epochs_0_4_9_and_the_last(runs: Runs) -> None:
    ran = runs(recipe=Recipe(samples=2 * BATCH), max_epochs=12)
    lines = ran.lines("validation")
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, 2), (4, 10), (9, 20), (11, 24)]
    assert [entry["epoch"] for entry in ran.result["validations"]] == [0, 4, 9, 11]
    assert [line["epoch"] for line in ran.lines("epoch")] == list(range(12))
    said = (ran.folder / "train.log").read_text()
    for line in lines:
        assert f"epoch {line['epoch']}: val loss {line['val loss']:.4f}" in said


def test_15_val_every_moves_them(runs: Runs) -> None:
    ran = runs(recipe=Recipe(samples=2 * BATCH), max_epochs=8, val_every=3)
    assert [line["epoch"] for line in ran.lines("validation")] == [0, 2, 5, 7]


def test_15_an_epoch_that_max_steps_cuts_short_is_summarised_and_validated(runs: Runs) -> None:
    ran = runs(recipe=Recipe(samples=4 * BATCH), max_epochs=9, max_steps=10)
    assert ran.result["finished"]
    assert ran.result["steps"] == 10
    assert [(line["epoch"], line["steps"]) for line in ran.lines("epoch")] == [(0, 4), (1, 4), (2, 2)]
    assert [(line["epoch"], line["step"]) for line in ran.lines("validation")] == [(0, 4), (2, 10)]


def test_15_validation_sees_every_sample_once_whatever_the_ranks(runs: Runs) -> None:
    """The toy's figures() asserts the count."""
    options = {"recipe": Recipe(samples=6 * BATCH, batch_norm=False), "max_epochs": 1, "lr": 1e-9}
    losses = [runs(f"{P}", world=P, **options).result["validations"][0]["val loss"] for P in (1, 3)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_validation_that_is_not_finite_ends_no_run_and_is_no_number(runs: Runs) -> None:
    recipe = Recipe(samples=2 * BATCH, figures=lambda loss: {"val loss": math.nan, "val perplexity": math.inf})
    ran = runs(recipe=recipe, max_epochs=1)
    assert ran.outcome.code == 0
    assert ran.result["validations"] == [{"epoch": 0, "step": 2, "val loss": None, "val perplexity": None}]
    assert "val loss not finite, val perplexity not finite" in (ran.folder / "train.log").read_text()


def test_16_the_learning_rate_falls_by_1_01_after_every_epoch(runs: Runs) -> None:
    ran = runs(recipe=Recipe(samples=3 * BATCH), max_epochs=7, lr=0.01)
    rates = {line["step"]: line["lr"] for line in ran.lines("train")}
    assert (rates[0], rates[2]) == (0.01, 0.01)
    assert rates[3] == pytest.approx(0.009901, abs=5e-7)  # after epoch 0
    assert rates[15] == pytest.approx(0.009515, abs=5e-7)  # after five
    assert [line["lr"] for line in ran.lines("epoch")] == [rates[3 * epoch] for epoch in range(7)]
    assert "epoch 0: " in (text := (ran.folder / "train.log").read_text())
    assert "lr 0.01, then 0.00990099" in text
    assert ran.trainers[0].optimizer.inner.param_groups[0]["lr"] == rates[20]


def test_17_the_loss_of_an_epoch_is_the_mean_over_all_ranks_and_batches(runs: Runs) -> None:
    ran = runs(world=3, recipe=Recipe(samples=4 * 3 * 2 * BATCH), max_epochs=2, nsteps_update=2)
    batches = [entry for trainer in ran.trainers for entry in trainer.task.losses]
    for epoch, line in enumerate(ran.lines("epoch")):
        losses = [loss for e, _, loss in batches if e == epoch]
        assert len(losses) == 4 * 3 * 2
        assert line["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert line["samples"] == 4 * 3 * 2 * BATCH
    last = [loss for e, step, loss in batches if (e, step) == (1, 3)]
    assert ran.lines("train")[7]["loss"] == pytest.approx(sum(last) / 6, rel=1e-5)


def test_17_the_summary_is_over_all_ranks_and_names_the_slowest() -> None:
    phases = PhaseMetrics()
    row = dict.fromkeys(REDUCER_COLUMNS, 1.0)
    for step, loss in enumerate((4.0, None, 2.0)):
        figures = StepMetrics(step, 0, 0.01, "dense", loss, 0 if loss is None else 24, skipped=loss is None)
        figures.step_seconds = 2.0
        phases.add(figures, row)
    ranks = [
        RankMetrics(compute, 0.2, 0.1, compute + 1, 10**9 * rank, 0, {"dense": 100.0 * rank})
        for rank, compute in enumerate((1, 4, 1))
    ]
    epoch = EpochMetrics.of(7, 0.01, phases, ranks)
    assert (epoch.epoch, epoch.steps, epoch.skipped, epoch.loss, epoch.samples) == (7, 3, 1, 3.0, 48)
    assert (epoch.slowest_rank, epoch.slowest_ratio) == (1, 2.0)
    assert (epoch.compute_seconds, epoch.data_seconds, epoch.exposed_seconds) == pytest.approx((2.0, 0.2, 0.1))
    assert (epoch.step_seconds, epoch.memory_bytes) == (5, 2 * 10**9)
    assert epoch.samples_per_second == 48 / 6
    assert epoch.sent_bytes == {"dense": [0.0, 100.0, 200.0]}


@pytest.mark.parametrize(("world", "steps"), [(1, 7), (2, 3), (3, 2)])
def test_17b_an_incomplete_global_batch_is_dropped(runs: Runs, world: int, steps: int) -> None:
    ran = runs(world=world, recipe=Recipe(samples=29), max_epochs=2)
    assert [line["steps"] for line in ran.lines("epoch")] == [steps, steps]
    assert ran.result["steps"] == 2 * steps


def test_5_an_epoch_without_steps_has_no_averages(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped after the last step of an epoch, and resumed by twice the ranks: nothing of it is left."""

    def stop(task: Regression, batch: Batch) -> None:
        if batch.step == 3 and task.share.world == 1:
            runs.stops[0].signal = Signals.SIGTERM

    recipe = Recipe(samples=4 * BATCH, before=stop)
    runs(recipe=recipe, max_epochs=2)
    with caplog.at_level(logging.DEBUG, "oktopk"):
        ran = runs(world=2, recipe=recipe, max_epochs=2, resume=True)
    zeroth = ran.lines("epoch")[0]
    assert (zeroth["epoch"], zeroth["steps"], zeroth["loss"]) == (0, 0, None)
    said = [record for record in caplog.records if record.getMessage().startswith("epoch 0")]
    assert [record.levelno for record in said if "val loss" not in record.getMessage()] == [logging.DEBUG]
    assert said[0].getMessage() == "epoch 0 has no steps to average"
    averages = [record for record in caplog.records if record.getMessage().startswith("  a step:")]
    assert len(averages) == 1  # epoch 1's
    assert [line["epoch"] for line in ran.lines("validation")] == [0, 1]


def test_parameters_that_differ_between_ranks_end_the_run_on_all_of_them(runs: Runs) -> None:
    def meddle(task: Regression, batch: Batch) -> None:
        if (batch.rank, batch.epoch, batch.step) == (1, 1, 2):
            with torch.no_grad():
                task.model[0].bias[3] += 1e-3

    recipe = Recipe(samples=4 * BATCH * 3, before=meddle)
    ran = runs(world=3, recipe=recipe, max_epochs=4)
    for said in ran.errors(ReplicaError):
        assert said.startswith("epoch 1: the parameters of rank 1 differ from those of rank 0")


def test_buffers_become_the_mean_over_ranks_at_the_end_of_an_epoch(runs: Runs) -> None:
    ran = runs(world=3, recipe=Recipe(samples=4 * BATCH * 3), max_epochs=1)
    before = [trainer.buffers_before[0] for trainer in ran.trainers]
    after = [buffers(trainer) for trainer in ran.trainers]
    for name in ("1.running_mean", "1.running_var"):
        assert not torch.equal(before[0][name], before[1][name])
        mean = torch.stack([own[name] for own in before]).mean(0)
        for own in after:
            torch.testing.assert_close(own[name], mean)
            assert torch.equal(own[name], after[0][name])
    assert [int(own["1.num_batches_tracked"]) for own in after] == [4, 4, 4]
