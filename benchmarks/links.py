"""A model that computes, trained over slow links: plain DDP against the hook, and what of the exchange is hidden.

Hosts are network namespaces with links of a chosen rate (needs root). Contenders take turns step by step on the
same model and data, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import arguments, write_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.sinks import MemorySink
from oktopk.tools.lab import Lab
from oktopk.tools.tables import table

WIDTH, LAYERS, BATCH = 512, 10, 256
CONTENDERS = {
    "plain DDP": None,
    "hook, dense": {"algorithm": "dense"},
    "hook, oktopk 1 %": {"density": 0.01},
    "hook, oktopk 1 %, fp16 values": {"density": 0.01, "values": "fp16"},
}
HEADERS = ["link", "contender", "step ms", "plain DDP / it", "MB sent", "exposed ms", "hidden"]


class Contender:
    """A model of its own, with plain DDP or with the hook."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.memory, self.seconds = MemorySink(), []
        self.state = None
        if settings is not None:
            state = oktopk.OkTopkState(warmup_steps=0, auto=False, timeout=60, sinks=[self.memory], **settings)
            self.state = state.register(self.model, self.optimizer)

    def step(self, x: torch.Tensor) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)

    def figures(self, counted: int) -> dict[str, float | None]:
        events = self.memory.steps[-counted:]
        return {
            "step_seconds": statistics.median(self.seconds[-counted:]),
            "sent_bytes": statistics.mean(e.wire.sent_bytes for e in events) if events else None,
            "exposed_seconds": statistics.median(e.exposed for e in events) if events else None,
            "hidden_share": statistics.median(e.hidden_share for e in events) if events else None,
        }


def job(steps: int) -> None:
    """What every host runs; rank 0 tells the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    contenders = {name: Contender(settings) for name, settings in CONTENDERS.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5 + steps):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        for contender in contenders.values():
            contender.step(x)
    if dist.get_rank() == 0:
        print(json.dumps({name: contender.figures(steps) for name, contender in contenders.items()}))
    dist.barrier()
    for contender in contenders.values():
        if contender.state is not None:
            contender.state.close()
    dist.destroy_process_group()


def rows(link: str, found: dict[str, dict[str, float | None]]) -> list[list[object]]:
    plain = found["plain DDP"]["step_seconds"]
    return [
        [
            link, name, 1e3 * own["step_seconds"], plain / own["step_seconds"],
            *(["", "", ""] if own["sent_bytes"] is None else
              [own["sent_bytes"] / 1e6, 1e3 * own["exposed_seconds"], f"{100 * own['hidden_share']:.0f} %"]),
        ]
        for name, own in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "", "links")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--links", nargs="+", default=["1gbit", "100mbit"], help="rates, like 1gbit")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.steps)
        return
    lines, records = [], []
    with Lab(options.hosts) as lab:
        for link in options.links:
            lab.set_rate(link)
            command = [sys.executable, __file__, "--job", "--steps", str(options.steps)]
            found = json.loads(lab.run(command, timeout=300)[0].stdout)
            lines += rows(link, found)
            records += [{"link": link, "hosts": options.hosts, "name": name, **own} for name, own in found.items()]
    print(table(HEADERS, lines))
    write_json(options.json, records)


if __name__ == "__main__":
    main()
