"""Streams: torch's sanitizer watches the real hook and worker, with backward on any stream, and finds no race."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oktopk
from oktopk import kernels
from oktopk.algorithms import OkTopkStatic
from oktopk.kernels import reference
from oktopk.utils import streams
from tests.support.streams import SIDE, CheckedStreams, Delivered

SIZE, BUCKETS = 400, 2


class Scaler:
    """A GradScaler, which counts how often its scale is read: each time the host waits."""

    def __init__(self) -> None:
        self.reads = 0

    def get_scale(self) -> float:
        self.reads += 1
        return 4.0

    def is_enabled(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook needs a process group; torch's kernels are seen by the checker, compiled ones are not."""
    monkeypatch.setattr(kernels, "backend_for", lambda device_type: reference)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def backward_passes(
    monkeypatch: pytest.MonkeyPatch, stream: int, broken: str | None = None, **options: Any
) -> Any:
    """Four steps of the hook, as DDP calls it on a stream: sparse, sparse, dense, sparse."""
    checked = CheckedStreams(broken)
    monkeypatch.setattr(streams, "find", lambda device: checked)
    dtype = options.pop("dtype", torch.float32)
    flats = [torch.zeros(SIZE, dtype=dtype) for _ in range(BUCKETS)]
    parameters = [[torch.nn.Parameter(torch.zeros(SIZE - 100, dtype=dtype)), torch.nn.Parameter(torch.zeros(100))]
                  for _ in range(BUCKETS)]  # fmt: skip
    checked.watch(*flats)
    schedule = [(0, 0.1), (2, None), (3, 0.1)]
    with oktopk.OkTopkState(density=schedule, warmup_steps=0, auto=False, timeout=20, **options) as state:
        for step in range(4):
            with checked.on(stream):
                for place, flat in enumerate(flats):
                    flat.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(place + 7 * step)))
                    future = state._reduce(Delivered(place, place + 1 == BUCKETS, flat, parameters[place]))
                future.wait()
                for flat in flats:
                    flat.mul_(0.1)  # the optimizer, on the stream of backward
            checked.watch(*state._engine._steps.reducer.residuals._flat.values())
        with checked.on(stream):
            state.state_dict()
    return checked


CASES: dict[str, dict[str, Any]] = {
    "fused buckets": {},
    "a group for each bucket": {"fusion_entries": 0},
    "bf16 gradients": {"dtype": torch.bfloat16},
    "always dense entries": {"dense": ["#1", "#3"]},
    "static shapes over messages": {"algorithm": "oktopk-static"},
    "without the host": {"algorithm": OkTopkStatic(resident=True), "values": "fp16"},
}


@pytest.mark.parametrize("stream", [0, 7])
@pytest.mark.parametrize("case", CASES)
def test_no_access_is_unsynchronised(monkeypatch: pytest.MonkeyPatch, case: str, stream: int) -> None:
    checked = backward_passes(monkeypatch, stream, **dict(CASES[case]))
    assert checked.errors == []
    assert checked.kernels == {stream, SIDE}  # backward's stream is left to backward


@pytest.mark.parametrize("broken", ["ready", "done"])
@pytest.mark.parametrize("case", CASES)
def test_each_event_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch, case: str, broken: str) -> None:
    assert backward_passes(monkeypatch, 7, broken, **dict(CASES[case])).errors


def test_memory_that_crosses_streams_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on the side stream; residuals, which are made there, on that of the caller."""
    checked = backward_passes(monkeypatch, 7)
    assert {stream for _, stream in checked.kept} == {7, SIDE}


def test_the_scale_of_a_grad_scaler_is_read_once_per_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    scaler = Scaler()
    assert backward_passes(monkeypatch, 7, grad_scaler=scaler).errors == []
    assert scaler.reads == 4
