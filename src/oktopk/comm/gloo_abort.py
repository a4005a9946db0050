"""How to close the connections of a gloo group while somebody waits for them."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch

AT_ONCE = timedelta(milliseconds=1)
"""A wait that is over at once."""

_NOTHING = 1
"""The first of the tags that nobody ever sends."""
INTERFACES = "GLOO_SOCKET_IFNAME"
"""Where gloo finds the names of its interfaces. Each has connections of its own, and tags take turns with them."""


def cut(group: Any, rank: int, world: int) -> None:
    """Close the connections of a group, whoever waits: gloo closes all of an interface when a receive is overdue.

    One from a rank that has hung up already fails at once and closes nothing, so that all ranks are tried.
    """
    if group is None:
        return
    never = torch.empty(1, dtype=torch.uint8)
    interfaces = os.environ.get(INTERFACES, "").count(",") + 1
    for tag in range(_NOTHING, _NOTHING + interfaces):
        for peer in (peer for peer in range(world) if peer != rank):
            with contextlib.suppress(RuntimeError):  # that it is overdue, or that nobody is there
                group.recv([never], peer, tag).wait(AT_ONCE)
