"""Labs without root: run the program again in a user namespace, where it is root over networks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from .namespaces import find_tool

_ENTER = 'mount -t tmpfs tmpfs /run && "$0" link set lo up && exec "$@"'
"""`ip netns` keeps its names below /run, which only root of the machine may write: a private /run takes its place.
"""
_TIMEOUT = 30.0


def user_namespace_problem() -> str | None:
    """Why a lab cannot be built in a user namespace here, and what to do about it; None if it can."""
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if not find_tool(tool):
            return f"command `{tool}` not found: install the package {package}"
    tried = subprocess.run(
        _inside(["true"]), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT, check=False
    )
    if tried.returncode:
        why = tried.stderr.strip() or f"exit code {tried.returncode}"
        return f"network namespaces need root, and this system allows no user namespaces ({why}): use sudo"
    return None


def enter_user_namespace() -> None:
    """Replace this process by the same command in a user namespace, if it is not root and the system allows that.

    The command starts from its beginning: call it before any work. It has the same process id, files and terminal,
    and the files that it writes belong to the same user.
    """
    if sys.platform != "linux" or os.geteuid() == 0 or user_namespace_problem() is not None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    words = _inside([sys.executable, *sys.orig_argv[1:]])
    os.execv(words[0], words)


def _inside(command: Sequence[str]) -> list[str]:
    unshare, ip = find_tool("unshare") or "unshare", find_tool("ip") or "ip"
    return [unshare, "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _ENTER, ip, *command]
