"""Runs with --average updates: ranks clip and step by themselves, skip together, and save their own moments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk import LocalOptimizer
from oktopk.train.config.options import ConfigError
from oktopk.train.config.origins import resolve
from tests.support.train.runs import BATCH, Batch, Recipe, Regression, Runs, assert_same, parameters

UPDATES: dict[str, Any] = {"average": "updates", "warmup_steps": 4, "density": 0.2, "compressor": "oktopk"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


@pytest.mark.parametrize("clips", [{"clip": 0.25}, {"norm_clip": 0.25}, {"clip": 0.25, "norm_clip": 9.0}], ids=str)
def test_each_rank_steps_with_its_own_clipped_gradient(runs: Runs, clips: dict[str, float]) -> None:
    ran = runs(world=3, recipe=Recipe(samples=6 * 3 * BATCH), max_epochs=2, **UPDATES, **clips)
    assert ran.outcome.code == 0
    for trainer in ran.trainers:
        assert isinstance(trainer.optimizer, LocalOptimizer)
        norms = trainer.optimizer.inner.norms  # type: ignore[attr-defined]
        assert max(norms) == pytest.approx(0.25, rel=1e-4)
        assert torch.equal(parameters(trainer), parameters(ran.trainers[0]))
    assert [line["phase"] for line in ran.lines("train")] == ["dense"] * 4 + ["sparse"] * 8
    assert all(line["update_seconds"] >= 0 for line in ran.lines("train"))
    moments = [trainer.optimizer.state_dict()["state"][0]["momentum_buffer"] for trainer in ran.trainers]
    assert not torch.equal(moments[0], moments[1])


def test_micro_batches_accumulate_on_each_rank(runs: Runs) -> None:
    recipe = Recipe(samples=4 * 8 * 2, batch_norm=False, carries=False)
    options = {**UPDATES, "recipe": recipe, "world": 2, "compression": False, "max_epochs": 2}
    halves = runs("halves", batch_size=4, nsteps_update=2, **options)
    whole = runs("whole", batch_size=8, **options)
    torch.testing.assert_close(parameters(halves.trainers[0]), parameters(whole.trainers[0]))


@pytest.mark.parametrize("clip", [{}, {"clip": 0.25}], ids=str)
def test_a_nan_on_one_rank_leaves_parameters_and_statistics_alone_on_all(
    runs: Runs, clip: dict[str, float]
) -> None:
    states: dict[tuple[int, int], dict[str, Tensor]] = {}

    def before(task: Regression, batch: Batch) -> None:
        states[batch.rank, batch.step] = {name: x.clone() for name, x in task.model.state_dict().items()}

    def after(task: Regression, batch: Batch, loss: Tensor) -> Tensor:
        return loss * math.nan if (batch.rank, batch.step) == (1, 5) else loss

    recipe = Recipe(samples=8 * BATCH * 2, before=before, after=after)
    ran = runs(world=2, recipe=recipe, max_epochs=1, **UPDATES, **clip)
    assert ran.outcome.code == 0
    for rank in range(2):
        for name, value in states[rank, 5].items():
            assert torch.equal(states[rank, 6][name], value), name
        assert not torch.equal(states[rank, 6]["0.weight"], states[rank, 7]["0.weight"])
    assert [line["step"] for line in ran.lines("train") if line["skipped"]] == [5]


def test_a_run_that_was_killed_goes_on_to_the_bit_with_the_moments_of_each_rank(runs: Runs) -> None:
    def die(task: Regression, batch: Batch) -> None:
        if (batch.epoch, batch.step) == (1, 4):
            raise RuntimeError("killed")

    options = {**UPDATES, "world": 2, "max_epochs": 3, "save_every": 4}
    whole = runs("whole", recipe=Recipe(samples=6 * BATCH * 2), **options)
    killed = runs("cut", recipe=Recipe(samples=6 * BATCH * 2, before=die), **options)
    assert len(killed.errors(RuntimeError)) == 2
    resumed = runs("cut", recipe=Recipe(samples=6 * BATCH * 2), resume=True, **options)
    assert_same(whole.state, resumed.state)
    assert "optimizer" not in whole.state["shared"]
    ranks = [whole.state[f"rank-000{rank}"]["optimizer"]["state"][0]["momentum_buffer"] for rank in range(2)]
    assert not torch.equal(*ranks)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_ranks_goes_on_with_the_mean_of_the_moments(runs: Runs, before: int, after: int) -> None:
    recipe = Recipe(samples=12 * BATCH)
    first = runs(world=before, recipe=recipe, max_epochs=2, **UPDATES)
    saved = [first.state[f"rank-000{rank}"]["optimizer"]["state"][0]["momentum_buffer"] for rank in range(before)]
    found: list[Tensor] = []

    def note(task: Regression, batch: Batch) -> None:
        if not found and batch.rank == 0:
            found.append(runs.started[0].optimizer.inner.state_dict()["state"][0]["momentum_buffer"].clone())

    second = runs(
        world=after, recipe=Recipe(samples=12 * BATCH, before=note), resume=True, **{**UPDATES, "max_epochs": 3}
    )
    assert second.outcome.code == 0
    torch.testing.assert_close(found[0], torch.stack(saved).double().mean(0).float())


def test_momentum_correction_is_for_gradients_only() -> None:
    with pytest.raises(ConfigError, match="momentum_correction is for gradients, and average is updates"):
        resolve({"average": "updates", "momentum_correction": True}, {})
    with pytest.raises(ConfigError, match="average must be one of gradients, updates"):
        resolve({"average": "weights"}, {})
