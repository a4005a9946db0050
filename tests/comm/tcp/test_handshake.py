"""Ranks prove to each other that they belong to the job; strangers neither get in, nor delay, nor end it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from oktopk.comm.tcp import handshake
from oktopk.comm.tcp.handshake import _ANSWER, _HELLO, _MAGIC, Endpoint
from oktopk.comm.tcp.rendezvous import advertise
from tests.support.tcp import KEY, close, join, listeners, meet

WORLDS = [2, 3, 5, 8]
NONCE = bytes(16)


@pytest.mark.parametrize("world", WORLDS)
def test_everybody_is_connected_with_everybody(world: int) -> None:
    links = meet(world)
    for rank, own in enumerate(links):
        assert sorted(own) == [peer for peer in range(world) if peer != rank]
        for peer, link in own.items():
            assert link.getpeername() == links[peer][rank].getsockname()
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    close(links)


@contextmanager
def strangers(endpoint: Endpoint, said: list[bytes]) -> Iterator[list[socket.socket]]:
    callers = [socket.create_connection(endpoint) for _ in said]
    try:
        for caller, words in zip(callers, said, strict=True):
            caller.sendall(words)
        yield callers
    finally:
        for caller in callers:
            caller.close()


def meet_among_strangers(said: list[bytes]) -> float:
    """Strangers are at the port of rank 0 before rank 1; returns the seconds until the ranks are connected."""
    there = listeners(2)
    endpoints = [advertise(listener) for listener in there]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, 0, there[0], endpoints)
        with strangers(endpoints[0], said):
            start = time.monotonic()
            second = pool.submit(join, 1, there[1], endpoints)
            links = [first.result(), second.result()]
            took = time.monotonic() - start
    assert links[0][1].getpeername() == links[1][0].getsockname()
    close(links)
    return took


NONSENSE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n" + bytes(30),
    bytes(500),
    _HELLO.pack(_MAGIC, 1, NONCE),
    _HELLO.pack(_MAGIC, 1, NONCE) + bytes(32),
    _HELLO.pack(_MAGIC, 0, NONCE) + bytes(32),
    _HELLO.pack(_MAGIC, 2**32 - 1, NONCE),
]


def test_strangers_are_not_let_in() -> None:
    """Those who say nothing, nonsense, or a rank without the key; the ranks still find each other."""
    assert meet_among_strangers(NONSENSE) < 2


def test_fifty_silent_connections_do_not_delay_the_start() -> None:
    assert meet_among_strangers([b""] * 50) < 2


def test_the_oldest_unidentified_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "MOST_UNIDENTIFIED", 0)
    assert meet_among_strangers([b""] * 50) < 2


class FewFiles(socket.socket):
    """A listener in a process that may open three more files."""

    def __init__(self, like: socket.socket, code: int) -> None:
        super().__init__(fileno=like.detach())
        self.code, self.links, self.refused = code, [], 0

    def accept(self) -> tuple[socket.socket, Any]:
        if sum(link.fileno() >= 0 for link in self.links) >= 3:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        self.links.append(super().accept()[0])
        return self.links[-1], None


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_strangers_make_room_when_there_are_no_files_left(code: int) -> None:
    few = FewFiles(listeners(1)[0], code)
    there = [few, *listeners(1)]
    endpoints = [advertise(listener) for listener in there]
    with strangers(endpoints[0], [b""] * 20), ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(join, rank, there[rank], endpoints) for rank in range(2)]
        close([rank.result() for rank in ranks])
    assert few.refused


def test_a_rank_without_files_for_anybody_fails() -> None:
    few = FewFiles(listeners(1)[0], errno.EMFILE)
    few.links = listeners(3)
    endpoints = [advertise(few), ("127.0.0.1", 9)]
    with strangers(endpoints[0], [b""]), pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        join(0, few, endpoints)
    for link in few.links:
        link.close()


def test_a_rank_that_was_turned_away_calls_again() -> None:
    """Rank 0 closes the first connection of rank 1, as if it had too many callers."""
    with socket.create_server(("127.0.0.1", 0)) as crowded:
        endpoints = [crowded.getsockname()[:2], ("127.0.0.1", 9)]
        with ThreadPoolExecutor(2) as pool:
            calling = pool.submit(join, 1, listeners(1)[0], endpoints)
            link, _ = crowded.accept()
            link.recv(_HELLO.size)
            link.close()
            answering = pool.submit(join, 0, crowded, endpoints)
            links = [answering.result(), calling.result()]
    close(links)


def test_who_has_another_key_is_refused_by_both_sides() -> None:
    there = listeners(2)
    endpoints = [advertise(listener) for listener in there]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, 0, there[0], endpoints, KEY, 2.0)
        second = pool.submit(join, 1, there[1], endpoints, b"another key")
        with pytest.raises(ConnectionError, match=r"rank 0 at 127\.0\.0\.1, .* handshake failed: unexpected peer"):
            second.result()
        with pytest.raises(TimeoutError, match="timed out waiting for rank 1 to connect"):
            first.result()


def test_a_recorded_handshake_is_worth_nothing() -> None:
    """A stranger repeats what rank 1 has once said to rank 0, with the same key."""
    there = listeners(2)
    endpoints = [advertise(listener) for listener in there]
    with socket.create_server(("127.0.0.1", 0)) as relay, ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, 0, there[0], endpoints)
        second = pool.submit(join, 1, there[1], [relay.getsockname()[:2], endpoints[1]])
        near, _ = relay.accept()
        with near, socket.create_connection(endpoints[0]) as far:
            hello = near.recv(_HELLO.size, socket.MSG_WAITALL)
            far.sendall(hello)
            near.sendall(far.recv(_ANSWER.size, socket.MSG_WAITALL))
            proof = near.recv(32, socket.MSG_WAITALL)
            far.sendall(proof)
            near.sendall(far.recv(1))
            close([first.result(), second.result()])
    listener = listeners(1)[0]
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(join, 0, listener, [advertise(listener), ("127.0.0.1", 9)], KEY, 2.0)
        with strangers(advertise(listener), [hello + proof]), pytest.raises(TimeoutError):
            again.result()


def test_a_rank_that_is_called_must_prove_itself() -> None:
    """Somebody else listens at the address of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(join, 1, listeners(1)[0], [impostor.getsockname()[:2], ("127.0.0.1", 9)])
        link, _ = impostor.accept()
        link.sendall(bytes(_ANSWER.size))
        with pytest.raises(ConnectionError, match="handshake failed: unexpected peer"):
            calling.result()
        link.close()


def test_a_rank_that_does_not_listen_is_named_and_not_waited_for() -> None:
    closed = listeners(1)[0]
    endpoint = advertise(closed)
    closed.close()
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"rank 0 at 127\.0\.0\.1, port {endpoint[1]}: .*refused"):
        join(1, listeners(1)[0], [endpoint, ("127.0.0.1", 9)], patience=60)
    assert time.monotonic() - start < 30


def test_a_rank_that_does_not_call_is_named() -> None:
    with pytest.raises(TimeoutError, match="timed out waiting for rank 1 and rank 2 to connect"):
        join(0, listeners(1)[0], [("127.0.0.1", 9)] * 3, patience=0.5)


def test_the_key_never_travels() -> None:
    """What a listening impostor gets from a rank holds nothing of the key."""
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(join, 1, listeners(1)[0], [impostor.getsockname()[:2], ("127.0.0.1", 9)], KEY, 1.0)
        link, _ = impostor.accept()
        said = link.recv(1000)
        link.close()
        impostor.close()
        with pytest.raises(OSError, match="rank 0"):
            calling.result()
    assert len(said) == _HELLO.size == struct.calcsize("<8sI16s")
    assert KEY not in said
