"""The states of all ranks in a checkpoint: loaded to the bit, shared among other ranks, or refused by all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import oktopk
from oktopk.integrations.base import RankFiles, attach

SIZE = 300


class Rank:
    """An AllReducer, which has what RankFiles needs of a state, on a thread."""

    def __init__(self, comm: oktopk.Communicator) -> None:
        weights = torch.nn.Parameter(torch.zeros(SIZE))
        self.comm = comm
        self.state = oktopk.AllReducer([("w", weights)], density=0.1, warmup_steps=0, comm=comm)

    def train(self, steps: int) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + self.comm.rank)
            self.state.sync({"w": torch.randn(SIZE, generator=generator)})


def save(stem: Path, world: int, steps: int = 3) -> list[dict[str, Any]]:
    """Let `world` ranks train and save; what they have then."""

    def job(comm: oktopk.Communicator) -> dict[str, Any]:
        rank = Rank(comm)
        rank.train(steps)
        RankFiles(str(stem)).save(rank.state)  # type: ignore[arg-type]
        return rank.state.state_dict()

    return oktopk.run_threads(world, job)


def load(stem: Path, world: int) -> list[dict[str, Any]]:
    """Let `world` new ranks load; what they have then."""

    def job(comm: oktopk.Communicator) -> dict[str, Any]:
        rank = Rank(comm)
        RankFiles(str(stem)).load(rank.state)  # type: ignore[arg-type]
        return rank.state.state_dict()

    return oktopk.run_threads(world, job)


def residuals(states: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([state["residuals"]["w"] for state in states])


def test_every_rank_gets_its_own_residuals_to_the_bit(tmp_path: Path) -> None:
    saved = save(tmp_path / "oktopk", 3)
    loaded = load(tmp_path / "oktopk", 3)
    assert torch.equal(residuals(loaded), residuals(saved))
    assert len({tuple(row.tolist()) for row in residuals(saved)}) == 3
    assert [state["step"] for state in loaded] == [3, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"oktopk-rank{rank}.pt" for rank in range(3)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_other_ranks_share_the_residuals(world: int, tmp_path: Path) -> None:
    """Σe'/P' = Σe/P, as oktopk.redistribute() has it."""
    saved = save(tmp_path / "oktopk", 3)
    loaded = load(tmp_path / "oktopk", world)
    torch.testing.assert_close(residuals(loaded).mean(0), residuals(saved).mean(0))
    assert [(state["rank"], state["world"], state["step"]) for state in loaded] == [
        (rank, world, 3) for rank in range(world)
    ]


def test_a_checkpoint_made_without_oktopk_starts_at_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="oktopk"):
        loaded = load(tmp_path / "oktopk", 2)
    assert [state["step"] for state in loaded] == [0, 0]
    assert "oktopk-rank0.pt: no such file, so residuals start at zero" in caplog.text


def remove_one(stem: Path) -> None:
    Path(f"{stem}-rank1.pt").unlink()


def damage_one(stem: Path) -> None:
    Path(f"{stem}-rank1.pt").write_bytes(b"not a checkpoint")


def let_one_be_older(stem: Path) -> None:
    newer = Path(f"{stem}-rank1.pt").read_bytes()
    save(stem, 2, steps=2)
    Path(f"{stem}-rank1.pt").write_bytes(newer)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            remove_one,
            r"oktopk-rank1\.pt: FileNotFoundError: the checkpoint is not complete: resume from another one",
        ),
        (damage_one, r"cannot load .*oktopk-rank1\.pt: "),
        (let_one_be_older, "ranks disagree on what the checkpoint has: rank . has step ., rank . step ."),
    ],
)
def test_what_one_rank_cannot_load_ends_the_job(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "oktopk", 2)
    spoil(tmp_path / "oktopk")

    with pytest.raises(ValueError, match=message):
        load(tmp_path / "oktopk", 2)


def test_a_single_process_has_nothing_to_average(caplog: pytest.LogCaptureFixture) -> None:
    """Frameworks do not wrap its model, and its script still runs."""
    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, logger="oktopk"):
        assert attach(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"density": 0.01}) is None
    assert "this is the only process" in caplog.text
