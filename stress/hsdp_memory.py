"""What FsdpState needs above native HSDP: 4 bytes per sharded parameter and rank, and a part that does not grow.

    python -m stress.hsdp memory

Two models have units of one size, but not equally many. Between them the difference to native HSDP grows by the
residual alone, so that the slope is 4 bytes. What is left belongs to the units that are exchanged together: by
default, until they send 250,000 entries; here about two, so that both models have several groups. Steps are
measured, not the start: that sends the parameters of replica 0 in parts of at most 64 MiB, of which there are
three copies for a moment.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import oktopk
from tests.support import worlds
from tests.support.hsdp import backward, make_mesh, make_net, parts, shard

WIDTH, BLOCKS, STEPS = 384, (8, 24), 4
OPTIONS: dict[str, Any] = {
    "density": 0.01, "warmup_steps": 1, "auto": False, "timeout": 60, "fusion_entries": 10_000,
}  # fmt: skip
UNIT = 8 * WIDTH**2 // 2
"""Entries of a block on each of two shards."""
_M_MMAP_THRESHOLD, _THRESHOLD = -3, 2**17


def _resident(what: str) -> int:
    """Bytes, as the kernel has counted: VmRSS, or VmHWM for the peak."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _use(connect: Callable[..., Any], native: bool, blocks: int) -> tuple[int, int, int]:
    """This rank's entries, and what it holds between steps and at most, above what it held before."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)  # large memory goes back to the system at once
    mesh = make_mesh(2, 2)
    small = shard(make_net(), mesh["shard"])  # imports, compiles and connects
    with oktopk.FsdpState(mesh, **OPTIONS).register(small):
        for step in range(3):
            backward(small, step)
    del small
    libc.malloc_trim(0)
    before = _resident("VmRSS")
    net = shard(make_net(width=WIDTH, blocks=blocks), mesh if native else mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    state = None
    if not native:
        state = oktopk.FsdpState(mesh, **OPTIONS).register(net, optimizer)
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    libc.malloc_trim(0)
    held, most = _resident("VmRSS") - before, _resident("VmHWM") - before
    if state is not None:
        state.close()
    return sum(part.numel() for part in parts(net).values()), held, most


def memory() -> str:
    """Above native HSDP, at two sizes: between steps and at the peak, the worst rank."""
    entries, held, most = [], [], []
    for blocks in BLOCKS:
        native, ours = (worlds.run("gloo", 4, _use, way, blocks, timeout=120) for way in (True, False))
        entries.append(ours[0][0])
        held.append(max(rank[1] for rank in ours) - max(rank[1] for rank in native))
        most.append(max(rank[2] for rank in ours) - max(rank[2] for rank in native))
    lines, wrong = [], False
    for what, above in (("between steps", held), ("at the peak", most)):
        slope = (above[1] - above[0]) / (entries[1] - entries[0])
        rest = max(extra - 4 * size for extra, size in zip(above, entries, strict=True))
        wrong = wrong or not 3.7 < slope < 4.3 or rest > 12 * 4 * UNIT
        figures = ", ".join(f"{a / 1e6:.1f} MB for {e:,}" for a, e in zip(above, entries, strict=True))
        lines.append(
            f"memory above native HSDP {what}: {figures} entries per rank: {slope:.2f} bytes per entry, and at "
            f"most {rest / 1e6:.1f} MB ({rest / (4 * UNIT):.1f} units)"
        )
    if wrong:
        raise AssertionError("\n".join(lines))
    return "\n".join(lines)
