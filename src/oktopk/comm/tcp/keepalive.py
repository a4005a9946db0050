"""Signs of life of other hosts, by the kernel: a rank that computes for minutes is alive, whatever its threads do.

The kernel probes an idle connection and ends it when nobody answers. It probes no connection with data on their
way; there we look for how long nothing was acknowledged. TCP_USER_TIMEOUT would do that too, but it also ends
connections to a rank that is alive and does not read.
"""

from __future__ import annotations

import socket
import struct

_INFO = struct.Struct("8B13I")
"""The start of Linux' struct tcp_info."""
_UNACKED, _LAST_ACK = 8 + 4, 8 + 12


def keep_alive(link: socket.socket, seconds: float) -> None:
    """Let the kernel end a connection whose other host has been silent for so long, as far as it can."""
    idle, interval = max(1, int(seconds / 3)), max(1, int(seconds / 6))
    count = max(1, int((seconds - idle) / interval))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", count)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_silent(link: socket.socket, seconds: float) -> bool:
    """Whether the other host has acknowledged nothing for so long, though there is something to acknowledge."""
    if not hasattr(socket, "TCP_INFO") or link.family == socket.AF_UNIX:
        return False
    info = _INFO.unpack(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return bool(info[_UNACKED] and info[_LAST_ACK] >= 1e3 * seconds)
