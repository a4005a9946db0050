"""Trains a model of ten equal layers with DDP and tells, as JSON, when its buckets were exchanged.

python overlap.py [--hold]

Backward waits at the first layer until the first buckets of a sparse step have been exchanged: that ends if they
are exchanged during backward at all, however busy the machine is. With --hold the worker thread is held back until
backward has ended, and backward does not wait. All times are of one rank's perf_counter.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.engine.async_reducer import AsyncReducer
from oktopk.engine.step import StepReducer
from oktopk.metrics.events import StepEvent
from oktopk.metrics.sinks import MemorySink

BUCKETS, WIDTH, BATCH = 10, 512, 2048
FIRST = 2
"""So many of the buckets are through before backward reaches the last layer it has to do."""
WARMUP, STEPS = 6, 12
SETTLING = (0, 1, WARMUP)
"""Steps that do not count: DDP makes its buckets anew after the first, and each phase loads its kernels."""
TIMEOUT = 60.0


def hold_back() -> None:
    """From now on no bucket is touched before finish(), which DDP's hook calls with the last one."""
    reduce, finish, backward_has_ended = StepReducer.reduce, AsyncReducer.finish, threading.Event()

    def reduce_later(self: StepReducer, *args: Any) -> None:
        if self.density is not None and not backward_has_ended.wait(TIMEOUT):  # dense sums are begun by the hook
            raise TimeoutError("backward did not end")
        reduce(self, *args)

    def finish_now(self: AsyncReducer) -> StepEvent:
        backward_has_ended.set()
        event = finish(self)
        backward_has_ended.clear()
        return event

    StepReducer.reduce = reduce_later  # type: ignore[method-assign]
    AsyncReducer.finish = finish_now  # type: ignore[method-assign]


class FirstBuckets:
    """Lets backward wait until the worker is through with them."""

    def __init__(self) -> None:
        self._done, self._changed, reduce = 0, threading.Condition(), StepReducer.reduce

        def reduce_and_count(stepping: StepReducer, *args: Any) -> None:
            reduce(stepping, *args)
            if stepping.density is not None:
                with self._changed:
                    self._done += 1
                    self._changed.notify()

        StepReducer.reduce = reduce_and_count  # type: ignore[method-assign]

    def wait(self, step: int) -> None:
        with self._changed:
            if step >= WARMUP and not self._changed.wait_for(lambda: self._done >= FIRST, TIMEOUT / 2):
                raise TimeoutError("no bucket is exchanged during backward")

    def begin_step(self) -> None:
        self._done = 0


def train(hold: bool) -> list[dict[str, Any]]:
    """What happened in every step that counts."""
    first_buckets = FirstBuckets()
    torch.manual_seed(dist.get_rank())
    # Without biases each weight fills a bucket: 1 MB, which takes 8 ms at 1 Gbit/s.
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    reached: list[float] = []

    def note_the_time(grad: Tensor) -> None:
        """Backward comes to the first layer, whose gradient is still to be computed."""
        if not hold:
            first_buckets.wait(len(reached))
        reached.append(time.perf_counter())

    def watch(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(note_the_time)

    layers[0].register_forward_hook(watch)
    ddp = DistributedDataParallel(model, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    sink = MemorySink()
    state = oktopk.OkTopkState(
        density=0.01, warmup_steps=WARMUP, auto=False, fusion_entries=0, sinks=[sink], timeout=TIMEOUT
    )
    state.register(ddp)
    x = torch.randn(BATCH, WIDTH)
    for _ in range(STEPS):
        first_buckets.begin_step()
        model.zero_grad()
        ddp(x).square().mean().backward()
    state.close()
    return [
        {
            "phase": step.phase,
            "at_first_layer": at_first_layer,
            "handed_over": step.handed_over,
            "stops": [reduction.stop for reduction in step.reductions],
            "backward_ms": 1e3 * (step.handed_over - step.start),
            "reductions_ms": 1e3 * step.seconds.total,
            "hidden_share": step.hidden_share,
        }
        for step, at_first_layer in zip(sink.steps, reached, strict=True)
        if step.step not in SETTLING
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold", action="store_true")
    hold = parser.parse_args().hold
    if hold:
        hold_back()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    print(json.dumps(train(hold)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
