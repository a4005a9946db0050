"""The state of FsdpState in torch.distributed.checkpoint: to the bit on the same mesh, and on others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import oktopk
from tests.support import worlds
from tests.support.hsdp import backward, make_mesh, make_net, parts, same, shard

pytestmark = pytest.mark.timeout(300)


class Run:
    """A model, its optimizer and its state, on a mesh."""

    def __init__(self, mesh: Any, **net: Any) -> None:
        self.net = shard(make_net(**net), mesh["shard"])
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05)
        self.state = oktopk.FsdpState(mesh, density=0.05, warmup_steps=2, auto=False, momentum=0.5, timeout=60)
        self.state.register(self.net, self.optimizer)

    def train(self, first: int, steps: int) -> dict[str, Tensor]:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            backward(self.net, step)
            self.optimizer.step()
        return parts(self.net)

    def save(self, folder: str) -> None:
        dcp.save({"model": self.net.state_dict(), "oktopk": self.state.state_dict()}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model = {"model": self.net.state_dict()}
        dcp.load(model, checkpoint_id=folder)
        self.net.load_state_dict(model["model"])
        self.state.load_checkpoint(folder)

    def means(self) -> dict[str, Tensor]:
        """Σe/R of each parameter, whole."""
        saved = self.state.state_dict()
        return {
            f"{memory} {name}": tensor.full_tensor().double().mean(0)
            for memory in ("residuals", "velocities")
            for name, tensor in saved[memory].items()
        }


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def save_and_load(connect: Callable[..., Any], folder: str) -> dict[str, Any]:
    mesh, found = make_mesh(2, 2), {}
    first = Run(mesh)
    first.train(0, 6)
    first.save(folder)
    means = first.means()
    if dist.get_rank() == 0:
        torch.save(means, f"{folder}.means")
    wanted = first.train(6, 3)
    again = Run(mesh, seed=1)
    again.load(folder)
    found["counters"] = again.state.step, again.state.schedule
    found["bits"] = same(again.train(6, 3), wanted)
    stateful = Run(mesh, seed=2)
    model = {"model": stateful.net.state_dict(), "oktopk": stateful.state}
    dcp.load(model, checkpoint_id=folder)
    found["stateful"] = same(stateful.train(6, 3), wanted)
    for replicas, shards in ((1, 4), (4, 1)):
        other = Run(make_mesh(replicas, shards), seed=3)
        other.load(folder)
        found[f"{replicas} x {shards}"] = furthest(other.means(), means)
        found[f"step of {replicas} x {shards}"] = other.state.step
        other.train(6, 2)
        other.state.close()
    found |= mistakes(mesh, folder) | {"recipe": recipe(f"{folder}-recipe")}
    for run in (first, again, stateful):
        run.state.close()
    return found


def mistakes(mesh: Any, folder: str) -> dict[str, str]:
    run, wider = Run(mesh), Run(mesh, width=16)
    run.train(0, 3)
    before, said = run.means(), {}
    plain, damaged, cut = (Path(f"{folder}-{what}") for what in ("plain", "damaged", "cut"))
    dcp.save({"model": run.net.state_dict()}, checkpoint_id=plain)
    if dist.get_rank() == 0:
        shutil.copytree(folder, damaged)
        shutil.copytree(folder, cut)
        (damaged / ".metadata").write_bytes(b"nonsense")
        for file in cut.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    for what, target, path in (
        ("another model", wider, folder), ("no state", run, plain), ("damaged", run, damaged),
        ("cut", run, cut), ("missing", run, f"{folder}-missing"),
    ):  # fmt: skip
        try:
            target.state.load_checkpoint(path)
        except ValueError as error:
            said[what] = str(error)
    for what, change in {
        "format": {"format": 99}, "bytes": {"shared": b"no"}, "nothing": None,
        "parameters": {"residuals": {"other": torch.zeros(1)}},
    }.items():  # fmt: skip
        state = {} if change is None else run.state.state_dict() | change
        try:
            run.state.load_state_dict(state)
        except ValueError as error:
            said[what] = str(error)
    said["unchanged"] = furthest(run.means(), before)
    run.state.close()
    wider.state.close()
    try:
        with oktopk.FsdpState(mesh, timeout=60) as unregistered:
            unregistered.state_dict()
    except RuntimeError as error:
        said["unregistered"] = str(error)
    return {"said": said}


def recipe(folder: str) -> dict[str, Any]:
    """That of docs/hsdp.md for torchtitan, line by line: its names, sums, optimizers and kind of checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    def build(seed: int) -> tuple[Any, oktopk.FsdpState, Any]:
        model = shard(make_net(seed), mesh["dp_shard"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        optimizers = [torch.optim.SGD([p], 0.01) for p in model.parameters()]
        state = oktopk.FsdpState(mesh, density=0.05, total_steps=20, warmup_steps=None, auto=False).register(model)
        for optimizer in optimizers:
            state.guard(optimizer)
        return model, state, optimizers

    def train(model: Any, state: oktopk.FsdpState, optimizers: Any, steps: range) -> dict[str, Tensor]:
        for step in steps:
            model.zero_grad()
            with state.no_sync():
                backward(model, 2 * step)
            backward(model, 2 * step + 1)
            for optimizer in optimizers:
                optimizer.step()
        return parts(model)

    first, again = build(0), build(1)
    train(*first, range(6))
    dcp.save({"model": first[0].state_dict(), "oktopk": first[1]}, checkpoint_id=folder)
    model = again[0].state_dict()
    dcp.load({"model": model, "oktopk": again[1]}, checkpoint_id=folder)
    again[0].load_state_dict(model)
    found = same(train(*first, range(6, 9)), train(*again, range(6, 9)))
    steps, schedule = again[1].step, again[1].schedule
    for _, state, _ in (first, again):
        state.close()
    return {"bits": found, "steps": steps, "sparse": schedule[-1][1]}


def load_on_two(connect: Callable[..., Any], folder: str) -> float:
    run = Run(make_mesh(1, 2), seed=3)
    run.load(folder)
    difference = furthest(run.means(), torch.load(f"{folder}.means"))
    run.train(6, 2)
    run.state.close()
    return difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("hsdp") / "checkpoint")


@pytest.fixture(scope="module")
def loaded(folder: str) -> list[dict[str, Any]]:
    return worlds.run("gloo", 4, save_and_load, folder, timeout=200)


def test_the_same_mesh_goes_on_to_the_bit(loaded: list[dict[str, Any]]) -> None:
    for rank in loaded:
        assert rank["counters"] == (6, [(0, None), (2, 0.05)])
        assert rank["bits"], "load_checkpoint()"
        assert rank["stateful"], "dcp.load() of the state itself"


def test_other_meshes_keep_the_mass(loaded: list[dict[str, Any]], folder: str) -> None:
    """Σe/R, to the rounding of float32; residuals are of the order of 1."""
    for rank in loaded:
        assert rank["1 x 4"] < 1e-6
        assert rank["4 x 1"] < 1e-6
        assert rank["step of 1 x 4"] == rank["step of 4 x 1"] == 6
    assert max(worlds.run("gloo", 2, load_on_two, folder)) < 1e-6


def test_the_recipe_for_torchtitan_works_on_a_mesh_with_its_names(loaded: list[dict[str, Any]]) -> None:
    assert all(rank["recipe"] == {"bits": True, "steps": 9, "sparse": 0.05} for rank in loaded)


SAID = {
    "another model": r"does not match the model: the residuals of emb.weight have the shape \(15, 7\)",
    "no state": "has no state of oktopk.FsdpState under 'oktopk'",
    "damaged": "cannot read the checkpoint",
    "cut": "cannot read the checkpoint",
    "missing": "cannot read the checkpoint",
    "format": "has format 99",
    "bytes": "checkpoint is damaged: the state that all ranks share",
    "nothing": "not a state_dict of oktopk.FsdpState",
    "parameters": "does not match the model: only in the checkpoint: other",
    "unregistered": r"call register\(model\) first",
}


def test_what_cannot_be_loaded_is_said_and_changes_nothing(loaded: list[dict[str, Any]]) -> None:
    for rank in loaded:
        for what, pattern in SAID.items():
            assert re.search(pattern, rank["said"].get(what, "nothing was said")), what
        assert rank["said"]["unchanged"] == 0
