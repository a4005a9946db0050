"""One NaN on one rank with the DDP hook: what the optimizer finds, and that training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.support import worlds
from tests.support.training import DDP, Parameters, batch, hook_up, mlp, parameters_of, same_bits, sgd

BAD = 6
"""The step with the NaN; steps are sparse from 3 on."""
CAPS = {"one bucket": 25.0, "several buckets": 0.003}


def trained(
    connect: Callable[..., Any], way: str, cap: float, bad: int | None, view: bool
) -> tuple[Parameters, Parameters, list[float]]:
    """Parameters before and after the bad step, and what the optimizer found in that step."""
    net = DDP(mlp(), bucket_cap_mb=cap, gradient_as_bucket_view=view)
    optimizer = sgd(net)
    enabled = way == "scaler"
    scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=1024.0)
    options: dict[str, Any] = {"grad_scaler": scaler} if "scaler" in way else {}
    with hook_up(net, optimizer if way == "guarded" else None, warmup_steps=3, **options) as state:
        for step in range(10):
            x, y = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = F.cross_entropy(net(x), y)
            if step == bad and dist.get_rank() == 1:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            if step == BAD:
                before = parameters_of(net)
                found = [float(p.grad.abs().sum()) for p in net.parameters()]
            scaler.step(optimizer)
            scaler.update()
            if step == BAD:
                after = parameters_of(net)
        assert state.stats()["skipped_steps"] == (bad is not None)
        if bad is not None and enabled:
            assert scaler.get_scale() == 512.0
        assert all(bool(part.isfinite().all()) for part in state.state_dict()["residuals"].values())
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    return before, after, found


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("way", ["guarded", "unguarded", "scaler", "disabled scaler", "autocast"])
def test_a_nan_on_one_rank(way: str, cap: str) -> None:
    """Guarded, or with a scaler, the optimizer changes nothing; otherwise it finds zeros, and never a NaN."""
    view = cap == "several buckets"
    ranks = worlds.run("gloo", 3, trained, way, CAPS[cap], BAD, view)
    first_before, first_after, _ = ranks[0]
    for before, after, found in ranks:
        assert same_bits(before, first_before)
        assert same_bits(after, first_after)
        if way in ("guarded", "scaler"):
            assert same_bits(before, after)
        if way == "scaler":
            assert all(value != value for value in found)
        else:
            assert found == [0.0] * len(found)
