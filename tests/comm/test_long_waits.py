"""Two clocks: a rank that is alive may be late for the whole timeout; a silent host is gone long before."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oktopk import Communicator, GroupCommunicator
from oktopk.comm import pack
from oktopk.comm.tcp import handshake, mesh
from oktopk.tools.lab import Lab
from oktopk.utils.timeouts import TIMEOUTS
from tests.support import worlds
from tests.support.labs import needs_lab, python

SILENCE, HELD = 2.0, 7
"""Seconds after which a silent host is gone in these tests; and for which a rank holds the interpreter. Both are
scaled down, from 30 s and from the minutes of a compiler: what counts is that HELD is far above SILENCE."""
BIG = 40_000_000
"""Bytes of a message that no connection takes at once."""


def hold_the_interpreter(connect: Callable[..., Communicator], operation: str) -> str:
    """Rank 1 runs nothing but one call, as a compiler does, while rank 0 waits for it."""
    for module in (handshake, mesh):
        module.TIMEOUTS = replace(TIMEOUTS, silence=SILENCE)  # type: ignore[attr-defined]
    comm = connect(timeout=60.0, companion=True)
    comm.all_reduce_(torch.ones(1), "all here")
    if comm.rank == 1:
        ctypes.PyDLL(None).sleep(HELD)
    if operation == "sum":
        comm.all_reduce_(torch.ones(1000), "dense")
    elif comm.rank == 0:
        comm.send(pack(torch.zeros(BIG, dtype=torch.uint8)), 1, "big")
    else:
        comm.recv(BIG + 8, 0, "big")
    return "done"


@pytest.mark.parametrize("operation", ["sum", "message"])
def test_a_rank_that_holds_the_interpreter_is_not_gone(operation: str) -> None:
    assert worlds.run("gloo", 2, hold_the_interpreter, operation) == ["done"] * 2


def timeouts(connect: Callable[..., Communicator]) -> list[float]:
    short = dist.new_group(timeout=timedelta(seconds=77))
    made: list[Any] = [connect(), GroupCommunicator(short), GroupCommunicator.exclusive(short)]
    return [comm.timeout for comm in (*made, GroupCommunicator.exclusive(timeout=33.0))]


def test_ranks_wait_as_long_as_their_process_group_does() -> None:
    """So rank 0 may validate for as long as torch's own collectives would wait for it."""
    with worlds.start("gloo", 2, timeouts) as ranks:
        assert ranks.running(range(2), 60) == []
        default = ranks.outcome(0).value[0]
        assert [ranks.outcome(rank).value for rank in range(2)] == [[default, 77.0, 77.0, 33.0]] * 2
    assert default >= 30 * 60, "torch's default for gloo"


DROPPED = """
from dataclasses import replace
import torch, torch.distributed as dist, oktopk
from oktopk.comm.tcp import handshake, mesh
from oktopk.utils.timeouts import TIMEOUTS
for module in (handshake, mesh):
    module.TIMEOUTS = replace(TIMEOUTS, silence=3.0)
operation, folder = {operation!r}, {folder!r}
dist.init_process_group("gloo")
comm = oktopk.GroupCommunicator.exclusive(timeout=120)
comm.all_reduce_(torch.ones(1), "all here")
open(f"{{folder}}/{{rank}}", "w").close()
until(f"{{folder}}/down")
if rank == 2: time.sleep(200)
try:
    if operation == "sum": comm.all_reduce_(torch.ones(1000), "dense")
    elif operation == "receive": comm.recv(100, 2, "late")
    else:
        for _ in range(100): comm.send(oktopk.comm.pack(torch.zeros(10**6)), 2, "big")
except oktopk.CommError as error:
    print(type(error).__name__, error)
"""


@needs_lab
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("operation", ["receive", "send", "sum"])
def test_a_host_whose_packets_are_dropped_is_gone_and_named(operation: str, tmp_path: Path) -> None:
    with Lab(hosts=3) as lab:
        running = lab.start(python(DROPPED.format(operation=operation, folder=str(tmp_path))))
        assert worlds.wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
        lab.set_link(2, up=False)
        start = time.monotonic()
        (tmp_path / "down").touch()
        ended = running._processes[:2]
        assert worlds.wait_until(lambda: all(process.poll() is not None for process in ended), 60)
        assert time.monotonic() - start < 60, "half of the timeout"
        said = [result.stdout for result in running.end()[:2]]
    assert all("rank 2" in text for text in said), said
    assert any("no sign of life" in text for text in said), said
