"""Weights to start from: of a file or a run, of the same network, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oktopk.comm import run_threads
from oktopk.train.checkpoint.snapshot import ModelIdentity, Snapshot
from oktopk.train.checkpoint.storage import Checkpoints
from oktopk.train.checkpoint.weights import load_weights
from oktopk.train.config.options import ConfigError
from oktopk.train.models.lstman4 import SpeechLSTM, Widths


def tiny() -> SpeechLSTM:
    torch.manual_seed(3)
    return SpeechLSTM(Widths(1, 8, 1)).eval()


@pytest.fixture
def trained() -> SpeechLSTM:
    """A network whose parameters and running statistics are not those of a new one."""
    model = tiny()
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.fill_(number + 1)
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for name, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("wrapped", [lambda d: d, lambda d: {"state_dict": d, "epoch": 3}])
def test_pretrain_from_a_file(
    tmp_path: Path, trained: SpeechLSTM, wrapped: Callable[[dict[str, Tensor]], dict[str, Any]]
) -> None:
    torch.save(wrapped(dict(trained.state_dict())), tmp_path / "weights.pt")
    model = tiny()
    load_weights(model, tmp_path / "weights.pt")
    assert_same(model, trained)


def save_run(run: Path, step: int, model: nn.Module) -> None:
    checkpoints = Checkpoints(run / "checkpoints", ModelIdentity.of("lstman4", model))
    shared = {"parameters": dict(model.named_parameters()), "optimizer": {"lr": 0.1}}
    own = {"oktopk": {}, "buffers": dict(model.named_buffers()), "task": {}}
    run_threads(2, lambda comm: checkpoints.save(comm, Snapshot(step, 0, shared, own)))


@pytest.mark.parametrize("step", [10, 100_000_000])
def test_pretrain_from_a_run_takes_its_newest_weights_and_statistics(
    tmp_path: Path, trained: SpeechLSTM, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The greatest step, not the last name."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    save_run(tmp_path, step - 1, tiny())
    save_run(tmp_path, step, trained)
    model = tiny()
    load_weights(model, tmp_path)
    assert_same(model, trained)
    manifest = tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    manifest.write_text("{}")
    with pytest.raises(ConfigError, match=r"--pretrain .*manifest\.json"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize("name", ["shared.pt", "rank-0000.pt"])
@pytest.mark.parametrize("given", [".", "checkpoints", "checkpoints/step-00000010", "file"])
def test_pretrain_refuses_a_run_with_one_flipped_bit(
    tmp_path: Path, trained: SpeechLSTM, monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    """Of the tensors themselves, which torch.load takes as they are."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    save_run(tmp_path, 10, trained)
    file = tmp_path / "checkpoints" / "step-00000010" / name
    content = bytearray(file.read_bytes())
    tensor = dict(trained.named_parameters() if name == "shared.pt" else trained.named_buffers())
    place = content.index(next(iter(tensor.values())).detach().numpy().tobytes())
    content[place + 2] ^= 1
    file.write_bytes(content)
    model, before = tiny(), tiny()
    path = file if given == "file" else tmp_path / given
    with pytest.raises(ConfigError, match=rf"--pretrain .*step-00000010.*{name} is damaged: its digest"):
        load_weights(model, path)
    assert_same(model, before)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pretrain_runs_nothing_of_what_it_reads(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"weight": Bomb(mark)}))
    torch.save({"weight": Bomb(mark)}, tmp_path / "packed.pt")
    for name in ("plain.pt", "packed.pt"):
        with pytest.raises(ConfigError, match=f"--pretrain .*{name}: not a state_dict"):
            load_weights(tiny(), tmp_path / name)
    assert not mark.exists()


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


WRONG_WEIGHTS: tuple[tuple[Callable[[dict[str, Tensor]], object], str], ...] = (
    (without("output.weight"), r"no weights for output\.weight; is it the same network"),
    (
        lambda w: {**w, "output.weight": torch.zeros(28, 8)},
        r"output\.weight has shape \[28, 8\] instead of \[29, 8",
    ),
    (
        lambda w: {**w, "output_norm.running_mean": torch.zeros(1)},
        r"running_mean has shape \[1\] instead of \[8\]",
    ),
    (lambda w: {**w, "output.weight": 3}, "more than plain tensors"),
    (lambda w: list(w), "no weights for"),
)


@pytest.mark.parametrize(("change", "words"), WRONG_WEIGHTS)
def test_pretrain_refuses_weights_of_another_network(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    model, before = tiny(), tiny()
    torch.save(change(dict(model.state_dict())), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=words):
        load_weights(model, tmp_path / "weights.pt")
    assert_same(model, before)


def test_pretrain_from_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.pt: No such file"):
        load_weights(tiny(), tmp_path / "absent.pt")
    with pytest.raises(ConfigError, match="no checkpoint found"):
        load_weights(tiny(), tmp_path)
    (tmp_path / "checkpoints" / "step-²").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no checkpoint found"):
        load_weights(tiny(), tmp_path)
    (tmp_path / "text.pt").write_text("weights")
    with pytest.raises(ConfigError, match="not a state_dict"):
        load_weights(tiny(), tmp_path / "text.pt")
