"""A forked process, such as a worker of a DataLoader, must not keep the connections of its parent open.

If it did, the other ranks would not notice that the parent has died.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None:
        """Close descriptors; what the parent has stays connected."""
        ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(connection: _Closable) -> None:
    """Close a socket, or what holds some, in every process that is forked from this one."""
    _open.add(connection)


def _close_all() -> None:
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
