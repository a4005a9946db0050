"""How the ranks of a job find out where to connect to, and whether they may.

Every rank introduces itself to all others, over a gloo group that connects them already: nothing of this is in the
job's store, where a stranger could read or change it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CommError
from ...utils.secret import SECRET, SECRET_FILE, is_required, read_secret
from ..process_group.gloo_abort import INTERFACES
from ..transport import format_ranks
from .forks import close_in_children
from .handshake import MOST_UNIDENTIFIED, Endpoint, derive_key

ROOM = 1024
"""The most bytes of an introduction."""
_LONGEST = 300
_SIOCGIFADDR = 0x8915


def tcp_allowed() -> bool:
    """Whether the environment allows plain TCP: not if it asks for gloo, or for encryption."""
    wanted = os.environ.get("OKTOPK_MESSAGES", "tcp")
    if wanted not in ("tcp", "gloo"):
        raise CommError(f"OKTOPK_MESSAGES must be tcp or gloo, got {wanted!r}")
    plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() == "TCP"
    return wanted == "tcp" and plain and hasattr(select, "poll")


@dataclass(frozen=True)
class Introduction:
    """What a rank tells all others before they connect."""

    nonce: str
    machine: str
    """Ranks with the same one reach each other by loopback."""
    fingerprint: str | None = None
    """Of its secret."""
    endpoint: Endpoint | None = None
    """Where it listens; None if it wants or has no TCP connections."""
    obstacle: str | None = None
    """Why it cannot listen."""
    problem: str | None = None
    """Why the job must not start."""
    mistake: str | None = None
    """Which argument is wrong on this rank."""
    required: bool = False
    """Whether it refuses messages over connections that no secret protects."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def with_faults(self, mistake: str | None, problem: str | None) -> Introduction:
        """The same with a wrong argument, or with a problem, unless it has one already."""
        if mistake is None and (problem is None or self.problem is not None):
            return self
        bare = replace(self, endpoint=None, obstacle=None)  # there is room for one long text
        return (
            replace(bare, problem=_short(str(problem)))
            if mistake is None
            else replace(bare, mistake=_short(mistake))
        )


def introduce(store: Any, name: str, world: int) -> tuple[Introduction, bytes | None, socket.socket | None]:
    """This rank's introduction, its secret, and the socket where it listens; problems are in the first.

    Args:
        store: The job's store; its host tells through which interface this rank is reached.
        name: Of the group of ranks.
        world: How many ranks there are.
    """
    nonce, machine = secrets.token_hex(16), _machine()
    try:
        secret = read_secret()
        tcp = tcp_allowed()
    except (ValueError, CommError) as error:
        return Introduction(nonce, machine, problem=_short(str(error))), None, None
    fingerprint = None if secret is None else derive_key(secret, b"fingerprint " + name.encode()).hex()[:16]
    me = Introduction(nonce, machine, fingerprint, required=is_required())
    if not tcp or world == 1:
        return me, secret, None
    try:
        listener = listen(local_address(store), world)
    except Exception as error:  # whatever it is, the others wait for this rank
        return replace(me, obstacle=_short(repr(error))), secret, None
    return replace(me, endpoint=advertise(listener)), secret, listener


def listen(host: str, world: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=world + MOST_UNIDENTIFIED)
    close_in_children(listener)
    return listener


def advertise(listener: socket.socket) -> Endpoint:
    """The endpoint that other ranks are told to connect to; a relay between ranks would be named here."""
    host, port, *_ = listener.getsockname()
    return host, port


def parse_introductions(texts: Sequence[bytes]) -> list[Introduction]:
    """Those of all ranks, in rank order."""
    found = []
    for rank, text in enumerate(texts):
        try:
            fields = json.loads(text)
            endpoint = fields.pop("endpoint")
            found.append(Introduction(**fields, endpoint=endpoint and (str(endpoint[0]), int(endpoint[1]))))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise CommError(f"rank {rank} sent an unreadable introduction: {error!r}") from error
    return found


def find_mistake(everybody: Sequence[Introduction], own: int) -> str | None:
    """Which rank was given a wrong argument; None if none was."""
    if (mistake := everybody[own].mistake) is not None:
        return mistake
    return next((f"on rank {rank}: {one.mistake}" for rank, one in enumerate(everybody) if one.mistake), None)


def find_problem(everybody: Sequence[Introduction]) -> str | None:
    """Why the job must not start, the same on all ranks; None if it may."""
    for rank, one in enumerate(everybody):
        if one.problem is not None:
            return f"rank {rank}: {one.problem}"
    remedy = f"set {SECRET} or {SECRET_FILE} to the same secret on all ranks"
    ranks = range(len(everybody))
    without = [rank for rank in ranks if everybody[rank].fingerprint is None]
    if without and len(without) < len(everybody):
        others = [rank for rank in ranks if rank not in without]
        return f"no secret on {format_ranks(without)}, but on {format_ranks(others)}: {remedy}"
    differing = [rank for rank in ranks if everybody[rank].fingerprint != everybody[0].fingerprint]
    if differing:
        return f"rank 0 has another secret than {format_ranks(differing)}: {remedy}"
    return None


def find_obstacle(everybody: Sequence[Introduction]) -> str | None:
    """Why messages cannot have TCP connections, the same on all ranks; "" if a rank does not want any."""
    for rank, one in enumerate(everybody):
        if one.obstacle is not None:
            return f"rank {rank} has no reachable address: {one.obstacle}"
    if any(one.endpoint is None for one in everybody):
        return ""
    hidden = [rank for rank, one in enumerate(everybody) if one.endpoint and _is_loopback(one.endpoint[0])]
    if hidden and spans_machines(everybody):
        return (
            f"{format_ranks(hidden)} found a loopback address for its own host, which other hosts cannot reach: "
            f"name the network interface in {INTERFACES}"
        )
    return None


def spans_machines(everybody: Sequence[Introduction]) -> bool:
    return len({one.machine for one in everybody}) > 1


def session_key(secret: bytes | None, everybody: Sequence[Introduction]) -> bytes:
    """What only the ranks of this job know: of their secret, and of nonces that are new in every session."""
    said = b"\n".join(one.to_bytes() for one in everybody)
    return derive_key(secret, hashlib.sha256(said).digest())


def local_address(store: Any) -> str:
    """Where other ranks reach this one: at gloo's interface, or at the one from which the store is reached."""
    interface = os.environ.get(INTERFACES, "").split(",")[0]
    if interface:
        import fcntl  # not on every system; nor are names of interfaces

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None) or _resolve_own_host(), getattr(store, "port", None) or 1
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the system only chooses a route
        return str(probe.getsockname()[0])


def _resolve_own_host() -> str:
    """For stores without a host: in files, or in memory."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # its name has no address: then all ranks are on this host
        return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.split("%")[0]).is_loopback


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _short(text: str) -> str:
    """Text that fits into an introduction, where JSON makes several bytes of a character that is not ASCII."""
    return text.encode("ascii", "replace").decode()[:_LONGEST]
