"""The relay of chaos: it passes on what it should, and does to the bytes what it says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stress.chaos.relay import BYTE_FAULTS, HARMLESS, Relay, Strike
from stress.chaos.relayed import through_relay

SENT = bytes(range(256)) * 4
SKIP = 300
SENDER, RECEIVER = 2, 0


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    with Relay(tmp_path) as one:
        yield one


def connected(relay: Relay) -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection from SENDER to RECEIVER, which does not know that there is a relay."""
    with through_relay(RECEIVER, relay.port, relay.folder):
        listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        with through_relay(SENDER, relay.port, relay.folder):
            sender = socket.create_connection(listener.getsockname(), 60)
        receiver = listener.accept()[0]
    receiver.settimeout(60)
    return sender, receiver


def arriving(sender: socket.socket, receiver: socket.socket) -> bytes:
    with sender, receiver:
        sender.sendall(SENT)
        with suppress(OSError):  # a connection that was reset cannot be shut down
            sender.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: receiver.recv(4096), b""))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", BYTE_FAULTS)
def test_what_arrives_is_the_fault(kind: str, seed: int, relay: Relay) -> None:
    ends = connected(relay)
    relay.strike = Strike(kind, (SENDER, RECEIVER), SKIP, seconds=0.01, seed=seed)
    if kind == "connection reset":
        with pytest.raises(ConnectionError):
            arriving(*ends)
        return
    arrived = arriving(*ends)
    assert relay.strike.done
    assert arrived[:SKIP] == SENT[:SKIP]
    assert (arrived == SENT) == (kind in HARMLESS)
    if kind == "connection cut":
        assert len(arrived) == SKIP
    if kind == "corrupt bytes":
        assert len(arrived) == len(SENT)
    if kind == "repeated bytes":
        more = len(arrived) - len(SENT)
        assert more > 0
        assert arrived[SKIP + more :] == SENT[SKIP:]
    if kind == "missing bytes":
        assert SENT[SKIP:].endswith(arrived[SKIP:])


def test_another_link_is_left_alone(relay: Relay) -> None:
    ends = connected(relay)
    relay.strike = Strike("corrupt bytes", (RECEIVER, SENDER), 0, seconds=0.0, seed=1)
    assert arriving(*ends) == SENT
    assert not relay.strike.done


def test_a_receiver_that_has_gone_is_a_closed_connection(relay: Relay) -> None:
    with through_relay(RECEIVER, relay.port, relay.folder):
        listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    listener.close()
    with through_relay(SENDER, relay.port, relay.folder), socket.create_connection(address, 60) as sender:
        assert sender.recv(1) == b""
