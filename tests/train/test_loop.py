"""The steps of a run: what is measured of each, the two phases, accumulation, clipping, and steps left out."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oktopk.errors import NonFiniteError
from tests.support.train.runs import BATCH, Batch, Ran, Recipe, Regression, Runs, parameters


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def curve(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(folder.glob("events.out.*"))
    events = [event for path in files for event in EventFileLoader(str(path)).Load()]
    return {e.step: v.tensor.float_val[0] for e in events for v in e.summary.value if v.tag == tag}


def timing(ran: Ran) -> list[dict[str, str]]:
    with open(ran.folder / "timing.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_nothing_is_nan(ran: Ran) -> None:
    """Item 5: in no file. That JSON has none is seen to by whoever reads it."""
    for name in ("metrics.jsonl", "timing.csv", "result.json", "train.log"):
        words = re.findall(r"[a-z]+", (ran.folder / name).read_text().lower())
        assert not {"nan", "inf", "infinity"} & set(words), name


# What is measured.


@pytest.mark.parametrize("world", [1, 2, 3])
def test_3_the_three_lists_have_an_entry_for_each_step_of_the_epoch(runs: Runs, world: int) -> None:
    recipe = Recipe(samples=5 * BATCH * world)
    ran = runs(world=world, recipe=recipe, max_epochs=3, max_steps=13, warmup_steps=7, density=0.1)
    assert ran.outcome.code == 0
    for trainer in ran.trainers:
        assert [tuple(map(len, lists)) for lists in trainer.lists] == [(5, 5, 5), (5, 5, 5), (3, 3, 3)]
        sparsities, ratios, sizes = trainer.lists[1]
        assert [sparsity == 0.0 for sparsity in sparsities] == [True, True, False, False, False]
        assert ratios[:2] == [1.0, 1.0]
        assert sizes[:2] == [4 * trainer.plan.parameters] * 2
        left = (trainer.sparsities, trainer.compression_ratios, trainer.communication_sizes)
        assert left == trainer.lists[2]  # the epoch is not over: a longer run would go on with it


@pytest.fixture(scope="module")
def ten_epochs(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """10 epochs of 14 steps, with the default warm-up of 128."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Runs(tmp_path_factory.mktemp("ten"), monkeypatch)(max_epochs=10, density=0.05)


def test_8_9_the_first_128_steps_are_dense_and_the_other_12_sparse(ten_epochs: Ran) -> None:
    assert ten_epochs.outcome.code == 0
    expected = ["dense"] * 128 + ["sparse"] * 12
    for kind in ("reduction", "step", "train"):
        assert [line["phase"] for line in ten_epochs.lines(kind)] == expected
        assert [line["step"] for line in ten_epochs.lines(kind)] == list(range(140))
    assert [row["phase"] for row in timing(ten_epochs)] == expected
    phases = ten_epochs.result["phases"]
    assert (phases["dense"]["steps"], phases["sparse"]["steps"]) == (128, 12)
    assert curve(ten_epochs.folder, "state/sparse_phase") == {step: float(step >= 128) for step in range(140)}


def test_9_10_the_plan_and_the_transition_are_said(ten_epochs: Ran) -> None:
    said = (ten_epochs.folder / "train.log").read_text()
    assert said.count("step 128 (epoch 9): the sparse phase starts") == 1
    assert "never" not in said
    assert "plan: 140 steps: 128 dense warm-up, 12 sparse; sparse starts in epoch 9" in said
    plan = json.loads((ten_epochs.folder / "plan.json").read_text())
    expected = {"steps": 140, "dense_steps": 128, "sparse_steps": 12, "first_sparse_epoch": 9, "warning": None}
    assert {name: plan[name] for name in expected} == expected
    assert f"plan: {plan['sentence']}" in said


def test_1_figures_of_both_phases_are_right_at_every_step(ten_epochs: Ran) -> None:
    n = ten_epochs.result["parameters"]
    k = round(0.05 * n)
    for line in ten_epochs.lines("step"):
        sparse = line["step"] >= 128
        expected = (1 - k / n, n / k, 8 * k) if sparse else (0.0, 1.0, 4 * n)
        assert (line["sparsity"], line["compression_ratio"], line["payload_bytes"]) == pytest.approx(expected)
    assert curve(ten_epochs.folder, "volume/payload_bytes")[127] == 4 * n
    assert curve(ten_epochs.folder, "volume/payload_bytes")[128] == 8 * k


def test_10_averages_are_given_for_each_phase(ten_epochs: Ran) -> None:
    n = ten_epochs.result["parameters"]
    k = round(0.05 * n)
    ninth = ten_epochs.lines("epoch")[9]["phases"]
    assert (ninth["dense"]["steps"], ninth["sparse"]["steps"]) == (2, 12)
    for phases in (ninth, ten_epochs.result["phases"]):
        dense, sparse = phases["dense"], phases["sparse"]
        assert (dense["sparsity"], dense["compression_ratio"], dense["payload_bytes"]) == (0.0, 1.0, 4 * n)
        measured = (sparse["sparsity"], sparse["compression_ratio"], sparse["payload_bytes"])
        assert measured == pytest.approx((1 - k / n, n / k, 8 * k))
    assert "sparse" not in ten_epochs.lines("epoch")[8]["phases"]
    assert_nothing_is_nan(ten_epochs)


def test_9_a_run_that_never_gets_sparse_says_so(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    assert runs(max_epochs=2).outcome.result["phases"].keys() == {"dense"}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("never reaches the sparse phase: it has 28 steps" in warning for warning in warnings)


# Clipping and accumulation.


def test_13_the_averaged_gradient_is_clipped_after_synchronisation(runs: Runs) -> None:
    recipe = Recipe(samples=6 * BATCH)
    ran = runs(world=2, recipe=recipe, max_epochs=1, clip=0.25)
    before = [line["gradient_norm"] for line in ran.lines("train")]
    for trainer in ran.trainers:
        after = trainer.optimizer.inner.norms
        assert after == pytest.approx([min(0.25, norm) for norm in before], rel=1e-4)
    assert max(before) > 1
    free = runs("free", world=2, recipe=recipe, max_epochs=1)
    assert free.trainers[0].optimizer.inner.norms[0] == pytest.approx(before[0])
    assert {line["gradient_norm"] for line in free.lines("train")} == {None}  # nobody has measured it


def test_13_a_ranks_own_gradient_is_clipped_before_compression(runs: Runs) -> None:
    recipe = Recipe(samples=6 * BATCH)
    free = runs("free", recipe=recipe, max_epochs=1, max_steps=1).trainers[0].optimizer.inner.norms
    alone = runs("alone", recipe=recipe, max_epochs=1, norm_clip=0.25).trainers[0].optimizer.inner.norms
    assert free[0] > 1
    assert alone[0] == pytest.approx(0.25, rel=1e-4)
    # Averaged over ranks whose gradients point elsewhere it gets shorter: it was clipped before, not after.
    mean = runs("mean", world=3, recipe=recipe, max_epochs=1, norm_clip=0.25).trainers[0].optimizer.inner.norms
    assert max(mean) < 0.2499


@pytest.mark.parametrize("world", [1, 3])
def test_13_two_micro_batches_train_as_one_of_twice_the_size(runs: Runs, world: int) -> None:
    recipe = Recipe(samples=4 * 8 * world, batch_norm=False, carries=False)
    options = {"recipe": recipe, "world": world, "compression": False, "max_epochs": 2}
    halves = runs("halves", batch_size=4, nsteps_update=2, **options)
    whole = runs("whole", batch_size=8, **options)
    assert halves.outcome.result["steps"] == whole.outcome.result["steps"] == 8
    torch.testing.assert_close(parameters(halves.trainers[0]), parameters(whole.trainers[0]))
    losses = [[line["loss"] for line in ran.lines("train")] for ran in (halves, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# Item 12: steps that are not finite.


def nan_loss(loss: Tensor) -> Tensor:
    return loss * math.nan


def infinite_loss_with_finite_gradients(loss: Tensor) -> Tensor:
    return loss + math.inf


def nan_gradient_of_a_finite_loss(loss: Tensor) -> Tensor:
    loss.register_hook(lambda grad: grad * math.nan)
    return loss


BROKEN = [nan_loss, infinite_loss_with_finite_gradients, nan_gradient_of_a_finite_loss]


@pytest.mark.parametrize("spoil", BROKEN)
@pytest.mark.parametrize("nsteps", [1, 2])
def test_12_all_ranks_leave_out_a_step_that_is_not_finite_on_one(runs: Runs, spoil: object, nsteps: int) -> None:
    states: dict[tuple[int, int], dict[str, Tensor]] = {}

    def before(task: Regression, batch: Batch) -> None:
        now = {name: value.clone() for name, value in task.model.state_dict().items()}
        states.setdefault((batch.rank, batch.step), now)

    def after(task: Regression, batch: Batch, loss: Tensor) -> Tensor:
        return spoil(loss) if (batch.rank, batch.step) == (1, 3) else loss  # type: ignore[operator]

    recipe = Recipe(samples=7 * BATCH * 3 * nsteps, before=before, after=after)
    ran = runs(world=3, recipe=recipe, max_epochs=1, warmup_steps=2, density=0.2, nsteps_update=nsteps)
    assert ran.outcome.code == 0
    for rank in range(3):
        for name, value in states[rank, 3].items():  # parameters and running statistics
            assert torch.equal(states[rank, 4][name], value), name
        assert not torch.equal(states[rank, 4]["0.weight"], states[rank, 5]["0.weight"])
        assert not torch.equal(states[rank, 4]["1.running_mean"], states[rank, 5]["1.running_mean"])
    for kind in ("step", "train"):
        assert [line["step"] for line in ran.lines(kind) if line["skipped"]] == [3]
    assert ran.lines("epoch")[0]["skipped"] == 1
    assert ran.result["phases"]["sparse"]["skipped"] == 1
    assert ran.result["steps"] == 7
    assert "7 steps, 1 of them skipped" in (ran.folder / "train.log").read_text()
    assert_nothing_is_nan(ran)


def test_12_the_loss_of_a_step_without_any_is_not_a_number_made_up(runs: Runs) -> None:
    def after(task: Regression, batch: Batch, loss: Tensor) -> Tensor:
        return nan_loss(loss) if batch.step == 2 else loss

    ran = runs(recipe=Recipe(after=after), max_epochs=1)
    assert [line["step"] for line in ran.lines("train") if line["loss"] is None] == [2]
    losses = [loss for _, _, loss in ran.trainers[0].task.losses if math.isfinite(loss)]
    assert ran.lines("epoch")[0]["loss"] == pytest.approx(sum(losses) / 13)
    assert timing(ran)[2]["loss"] == ""
    assert_nothing_is_nan(ran)


@pytest.mark.parametrize(("warmup", "where"), [(128, "rank 1"), (0, "rank 1")])
def test_12_too_many_in_a_row_are_an_error_that_says_where(runs: Runs, warmup: int, where: str) -> None:
    def after(task: Regression, batch: Batch, loss: Tensor) -> Tensor:
        bad = batch.step in (1, 2) or batch.step >= 4  # the first two are forgiven
        return nan_loss(loss) if bad and batch.rank == 1 else loss

    recipe = Recipe(samples=10 * 2 * BATCH, after=after)
    ran = runs(world=2, recipe=recipe, max_epochs=1, max_skipped=3, warmup_steps=warmup)
    for said in ran.errors(NonFiniteError):
        assert "3 steps in a row" in said
        assert f"step 6: {where}: 3.bias" in said


def test_13_momentum_correction_gives_dense_steps_the_same_momentum(runs: Runs) -> None:
    """In a dense step it does not matter on which side of the sum the momentum is."""
    options = {"max_epochs": 1, "warmup_steps": 100, "momentum": 0.9, "weight_decay": 0.0}
    after = runs("after", world=3, recipe=Recipe(samples=6 * 3 * BATCH), **options)
    before = runs("before", world=3, recipe=Recipe(samples=6 * 3 * BATCH), momentum_correction=True, **options)
    assert before.trainers[0].optimizer.param_groups[0]["momentum"] == 0.0
    torch.testing.assert_close(parameters(after.trainers[0]), parameters(before.trainers[0]))
