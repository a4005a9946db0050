"""How to close the connections of a gloo group while a thread waits for them."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch

from ...utils.timeouts import TIMEOUTS

_UNUSED_TAG = 1
"""The first of the tags that no message has."""
INTERFACES = "GLOO_SOCKET_IFNAME"
"""Where gloo finds the names of its interfaces. Each has its own connections, and tags take turns with them."""


def abort_connections(group: Any, rank: int, world: int) -> None:
    """Close the connections of a group, which wakes every wait: gloo closes an interface when a receive times out.

    A receive from a rank that is gone fails at once and closes nothing, so all ranks are tried.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    interfaces = os.environ.get(INTERFACES, "").count(",") + 1
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + interfaces):
        for peer in (peer for peer in range(world) if peer != rank):
            with contextlib.suppress(RuntimeError):  # it timed out, or the peer is gone
                group.recv([nothing], peer, tag).wait(timedelta(seconds=TIMEOUTS.immediate))
