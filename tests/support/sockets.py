"""Where processes listen, as Linux tells."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket at which a process listens."""
    held = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in held:
                address, port = local.split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    words = struct.pack(f"={len(text) // 8}I", *(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
