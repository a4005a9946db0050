"""What the tests of the lab share: the code their jobs begin with, and a look at the machine from outside."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from pathlib import Path

import pytest

SPACES = Path("/var/run/netns")
needs_lab = pytest.mark.usefixtures("buildable")


def machine_interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net")) if Path("/sys/class/net").exists() else []


def spaces_of(owner: int) -> list[str]:
    names = os.listdir(SPACES) if SPACES.exists() else []
    return sorted(name for name in names if name.startswith(f"oktopk-{owner}-"))


def inodes(names: list[str]) -> set[int]:
    return {(SPACES / name).stat().st_ino for name in names}


def processes_in(spaces: set[int]) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino in spaces:
                found.append(int(pid))
    return found


def python(code: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]


PRELUDE = """
import os, socket, subprocess, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def address(host): return f"10.77.0.{host + 1}"
def listen(port=4000): return socket.create_server((address(rank), port), backlog=world)
def connect(host, port=4000, seconds=40):
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((address(host), port), timeout=seconds)
        except OSError:
            if time.monotonic() > end: raise
            time.sleep(0.01)
def until(path, seconds=60):
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < end, path
        time.sleep(0.01)
def read(peer, count):
    peer.settimeout(60)
    while count:
        data = peer.recv(min(count, 2**20))
        assert data
        count -= len(data)
"""
