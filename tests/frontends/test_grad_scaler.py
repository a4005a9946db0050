"""The DDP front end under a GradScaler that nobody has told it of, as in a script with the README's line added."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import oktopk
from tests.support import worlds
from tests.support.training import (
    DDP,
    Mass,
    Parameters,
    assert_conserved,
    batch,
    hook_up,
    mlp,
    parameters_of,
    same_bits,
    sgd,
)

LIMIT, FIRST = 2.0**10, 2.0**13
"""Gradients overflow with scales above the limit; the first scale is so many powers of two above it."""
STEPS = 68


class Overflow(torch.autograd.Function):
    """What 16-bit gradients do: the gradient of the loss is the scale, and too large a one becomes infinite."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(grad > LIMIT, torch.inf, grad)


class Trained:
    """A script with a GradScaler: what became of it."""

    def __init__(self, clips: bool = False, cap: float = 25.0, fused: bool = False, **options: Any) -> None:
        self.net = DDP(mlp(), bucket_cap_mb=cap)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9, fused=fused)
        self.clips = clips
        self.state = hook_up(self.net, self.optimizer, **options) if options else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=20)
        self.skipped: list[int] = []
        self.growths = 0
        self.masses = [
            {p.numel(): torch.zeros(p.numel()).double() for p in self.net.parameters()} for _ in range(3)
        ]

    def train(self, steps: int = STEPS) -> Trained:
        for step in range(steps):
            x, y = batch(dist.get_rank(), step)
            self.optimizer.zero_grad()
            own = torch.autograd.grad(F.cross_entropy(self.net.module(x), y), list(self.net.module.parameters()))
            self.scaler.scale(Overflow.apply(F.cross_entropy(self.net(x), y))).backward()
            self.scaler.unscale_(self.optimizer)
            applied = [p.grad.clone() for p in self.net.parameters()]
            if self.clips:
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            before = self.scaler.get_scale()
            self.scaler.update()
            if self.scaler.get_scale() < before:
                self.skipped.append(step)
            else:
                self._weigh(own, applied)
            self.growths += self.scaler.get_scale() > before
        return self

    def _weigh(self, own: tuple[Tensor, ...], applied: list[Tensor]) -> None:
        for grad, mean in zip(own, applied, strict=True):
            for mass, part in zip(self.masses, (grad, grad.abs(), mean), strict=True):
                mass[grad.numel()] += part.double().flatten()

    def mass(self) -> Mass:
        assert self.state is not None
        residual = {part.numel(): part.double() for part in self.state.state_dict()["residuals"].values()}
        return Mass(*self.masses, residual)


def without_scaler(skipped: list[int], **options: Any) -> tuple[Parameters, Parameters]:
    """The same script without a scaler, where the loss of these steps is a NaN: parameters and residuals."""
    net = DDP(mlp())
    optimizer = sgd(net)
    with hook_up(net, optimizer, **options) as state:
        for step in range(STEPS):
            x, y = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            (F.cross_entropy(net(x), y) * (float("nan") if step in skipped else 1.0)).backward()
            optimizer.step()
        return parameters_of(net), state.state_dict()["residuals"]


SPARSE = {"warmup_steps": 5, "auto": False}


def compare(connect: Callable[..., Any]) -> dict[str, Any]:
    plain = Trained().train()
    found: dict[str, Any] = {"plain": plain.skipped, "growths": plain.growths}
    for name, of_script, options in (
        ("dense", {}, {"auto": True}),
        ("dense in buckets", {"cap": 0.003}, {}),
        ("clipped", {"clips": True}, {}),
    ):
        script = Trained(warmup_steps=128, **of_script, **options).train()
        other = Trained(clips=True).train() if "clips" in of_script else plain
        found[name] = script.skipped, same_bits(parameters_of(script.net), parameters_of(other.net))
    script = Trained(fused=True, warmup_steps=128).train()  # its arithmetic has other roundings
    pairs = zip(script.net.parameters(), plain.net.parameters(), strict=True)
    found["fused"] = script.skipped, all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs)
    script = Trained(**SPARSE).train()
    assert script.state is not None
    parameters, residuals = without_scaler(script.skipped, **SPARSE)
    same = same_bits(parameters_of(script.net), parameters)
    found["sparse"] = script.skipped, same and same_bits(script.state.state_dict()["residuals"], residuals)
    found["masses"] = [
        Trained(**options).train().mass()
        for options in (SPARSE, {**SPARSE, "cap": 0.003}, {**SPARSE, "warmup_steps": 0, "clips": True})
    ]
    return found


@pytest.mark.timeout(180)
def test_a_script_with_a_scaler_needs_no_more_than_the_line() -> None:
    """Dense steps are those of plain DDP, to the bit; sparse ones are those of a run without a scaler."""
    ranks = worlds.run("gloo", 2, compare)
    for found in ranks:
        plain = found["plain"]
        assert plain[:3] == [0, 1, 2]  # the first scale is too large
        assert len(plain) >= 5
        assert found["growths"] >= 3
        for way in ("dense", "dense in buckets", "clipped", "fused", "sparse"):
            assert found[way] == (plain, True), way
    for masses in zip(*(found["masses"] for found in ranks), strict=True):
        assert_conserved(masses)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "skipped" in record.getMessage():
            self.lines.append((record.levelname, record.getMessage()))


def hear(job: Callable[[], Any]) -> list[tuple[str, str]]:
    heard, logger = Heard(), logging.getLogger("oktopk")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        job()
    finally:
        logger.removeHandler(heard)
    return heard.lines


def speak(connect: Callable[..., Any]) -> list[list[tuple[str, str]]]:
    def fails_at_first() -> None:
        without_scaler([0, 30], warmup_steps=2)

    return [hear(lambda: Trained(**SPARSE).train(50)), hear(fails_at_first)]


def test_back_offs_are_short_and_other_losses_are_warnings() -> None:
    first, second = worlds.run("gloo", 2, speak)
    assert second == [[], []]  # rank 0 speaks
    routine, other = first
    assert {level for level, _ in routine} == {"INFO"}
    assert all(len(line) < 100 for _, line in routine)
    assert "step 23 skipped: the GradScaler's scale of 2048 is too large" in routine[3][1]
    assert [level for level, _ in other] == ["INFO", "WARNING", "WARNING"]
    for step, (_, line) in zip((0, 30), other[1:], strict=True):
        assert f"step {step} skipped on all ranks: non-finite gradients in rank 0: " in line


def error_of(job: Callable[[], Any]) -> str:
    try:
        job()
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("there was to be an error")


def late() -> None:
    """The scaler comes when residuals are there already."""
    script = Trained(warmup_steps=0)
    for _ in range(3):
        x, y = batch(dist.get_rank(), 0)
        script.optimizer.zero_grad()
        F.cross_entropy(script.net(x), y).backward()
        script.optimizer.step()
    script.train(5)


def gone() -> None:
    """It does not take all steps."""
    script = Trained(warmup_steps=0).train(5)
    script.optimizer.step()


def resumed() -> None:
    saved = Trained(warmup_steps=2).train(9).state.state_dict()  # type: ignore[union-attr]
    with hook_up(DDP(mlp()), grad_scaler=torch.amp.GradScaler("cpu", enabled=False)) as state:
        state.load_state_dict(saved)  # the run goes on without a scaler
    Trained(warmup_steps=2).state.load_state_dict(saved)  # type: ignore[union-attr]


def wrapped() -> None:
    net = mlp()
    optimizer = oktopk.DistributedOptimizer(sgd(net), model=net)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(F.cross_entropy(net(batch(0, 0)[0]), batch(0, 0)[1])).backward()
    optimizer.synchronize()
    scaler.step(optimizer)


REFUSED = {
    "norm_clip": lambda: Trained(norm_clip=1.0).train(5),
    "fp16": lambda: Trained(warmup_steps=9, warmup_values="fp16").train(5),
    "late": late,
    "gone": gone,
    "resumed": resumed,
    "wrapped": wrapped,
}


def refusals(connect: Callable[..., Any]) -> dict[str, str]:
    return {name: error_of(job) for name, job in REFUSED.items()}


def test_what_needs_the_scale_earlier_is_refused_by_name() -> None:
    for said in worlds.run("gloo", 2, refusals):
        for case in ("norm_clip", "fp16", "late"):
            assert "its scale was needed before the optimizer's first step: pass it as grad_scaler=" in said[case]
        assert "call scaler.step(optimizer), or pass grad_scaler=" in said["gone"]
        assert "saved by a run with a GradScaler" in said["resumed"]
        assert "pass DistributedOptimizer(grad_scaler=scaler)" in said["wrapped"]
