"""Connections for messages: nothing is lost or mixed up, nobody waits for ever, and strangers are not let in."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oktopk import CommError, Communicator, WireError
from oktopk.comm import group
from oktopk.comm.messages import Closed, TransferError, pack
from oktopk.comm.tcp import rendezvous as meeting
from oktopk.comm.tcp.mesh import Mesh
from oktopk.comm.tcp.rendezvous import connect_all
from oktopk.metrics.traffic import Operation
from oktopk.utils.timeouts import TIMEOUTS
from tests.support import worlds

SOON, LONG = timedelta(seconds=0.3), timedelta(seconds=30)
WORLDS = [2, 3, 5, 8]
IT = 1, Operation("recv", "test")
"""How errors call a message."""


def meet(world: int, store: Any = None, patience: float = 30.0) -> list[dict[int, socket.socket]]:
    shared = dist.HashStore() if store is None else store
    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(connect_all, shared, r, world, time.monotonic() + patience) for r in range(world)]
        return [call.result() for call in calls]


@contextmanager
def meshes(world: int) -> Iterator[list[Mesh]]:
    made = [Mesh(links) for links in meet(world)]
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()


def on_all(made: list[Mesh], job: Callable[[int, Mesh], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(job, range(len(made)), made, timeout=60))


def message(size: int, seed: int) -> Tensor:
    return pack(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8)))


@pytest.mark.parametrize("world", WORLDS)
def test_everybody_is_connected_with_everybody(world: int) -> None:
    links = meet(world)
    for rank, own in enumerate(links):
        assert sorted(own) == [peer for peer in range(world) if peer != rank]
        for peer, link in own.items():
            assert link.getpeername() == links[peer][rank].getsockname()
    for link in (link for own in links for link in own.values()):
        link.close()


@pytest.mark.parametrize("world", WORLDS)
def test_messages_come_whole_and_in_order(world: int) -> None:
    """Many under way at once, of any size, waited for in any order."""
    sizes = [0, 1, 7, 100, 70_000, 3, 400_000]

    def seed(source: int, to: int, number: int) -> int:
        return 10_000 * source + 100 * to + number

    def job(rank: int, mesh: Mesh) -> None:
        peers = [peer for peer in range(world) if peer != rank]
        receives, sends = {}, []
        for number, size in enumerate(sizes):
            for peer in peers:
                receives[peer, number] = mesh.receive(size + 8, peer)
                sends.append(mesh.send(message(size, seed(rank, peer, number)), peer))
        order = list(receives.items())
        Random(rank).shuffle(order)
        for (peer, number), receiving in order:
            receiving.wait(LONG)
            found = receiving.message(*IT)
            assert torch.equal(found, message(sizes[number], seed(peer, rank, number)))
        for sending in sends:
            sending.wait(LONG)

    with meshes(world) as made:
        on_all(made, job)


def test_all_may_send_more_than_connections_hold_before_they_receive() -> None:
    """Who waits for a send takes in what others send meanwhile: otherwise all would wait for each other."""
    size, posted = 60_000_000, threading.Barrier(3)

    def job(rank: int, mesh: Mesh) -> None:
        peers = [peer for peer in range(3) if peer != rank]
        receives = {peer: mesh.receive(size + 8, peer) for peer in peers}
        sends = [mesh.send(message(size, rank), peer) for peer in peers]
        posted.wait(60)  # until then nobody takes anything in
        assert not any(sending.done for sending in sends)
        posted.wait(60)
        for sending in sends:
            sending.wait(LONG)
        for peer, receiving in receives.items():
            receiving.wait(LONG)
            assert torch.equal(receiving.message(*IT), message(size, peer))

    with meshes(3) as made:
        on_all(made, job)


def send_in_vain(mesh: Mesh, peer: int) -> None:
    for _ in range(100):
        mesh.send(message(100_000, 1), peer).wait(LONG)


def test_who_hangs_up_is_lost_and_nobody_else() -> None:
    with meshes(3) as made:
        from_1, from_2 = made[0].receive(100, 1), made[0].receive(100, 2)
        made[1].close()
        made[2].send(message(20, 5), 0)
        from_2.wait(LONG)
        assert torch.equal(from_2.message(*IT), message(20, 5))
        with pytest.raises(TransferError, match=r"closed by peer|reset"):
            from_1.wait(LONG)
        with pytest.raises(TransferError):  # the first may still find room on this side
            send_in_vain(made[0], 1)


def test_a_message_that_was_sent_before_hanging_up_arrives() -> None:
    with meshes(2) as made:
        made[1].send(message(50_000, 3), 0).wait(LONG)
        made[1].close()
        receiving = made[0].receive(60_000, 1)
        receiving.wait(LONG)
        assert torch.equal(receiving.message(*IT), message(50_000, 3))


def test_a_wait_ends_in_time_and_can_be_repeated() -> None:
    with meshes(2) as made:
        receiving = made[0].receive(100, 1)
        for _ in range(2):
            with pytest.raises(TransferError, match="timed out"):
                receiving.wait(SOON)
        made[1].send(message(9, 1), 0)
        receiving.wait(LONG)
        assert torch.equal(receiving.message(*IT), message(9, 1))


def test_closing_wakes_who_waits_and_ends_all_that_follows() -> None:
    with meshes(2) as made:
        receiving, found = made[0].receive(100, 1), []

        def wait() -> None:
            with pytest.raises(Closed):
                receiving.wait(LONG)
            found.append("woken")

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        made[0].close()
        waiting.join(60)
        assert found == ["woken"]
        made[0].close()
        with pytest.raises(Closed):
            receiving.wait(LONG)
        with pytest.raises(Closed):
            made[0].receive(100, 1)
        with pytest.raises(Closed):
            made[0].send(message(9, 1), 1)


def test_who_waits_for_a_mesh_that_is_closed_is_told_so() -> None:
    """Also if it has not begun to wait by then."""
    with meshes(2) as made:
        receiving, sending = made[0].receive(100, 1), made[0].send(message(9, 1), 1)
        made[0].close()
        with pytest.raises(Closed):
            receiving.wait(LONG)
        sending.wait(LONG)  # is gone already


def test_a_forked_process_leaves_the_connections_to_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with meshes(2) as made:
        twin = Mesh({peer: link.dup() for peer, link in made[0]._links.items()})
        monkeypatch.setattr(os, "getpid", lambda: -1)
        twin.close()
        monkeypatch.undo()
        receiving = made[0].receive(100, 1)
        made[1].send(message(9, 1), 0)
        receiving.wait(LONG)
        assert torch.equal(receiving.message(*IT), message(9, 1))


def test_a_message_that_is_too_large_is_an_error_and_the_next_one_arrives() -> None:
    with meshes(2) as made:
        made[1].send(message(5000, 1), 0)
        made[1].send(message(50, 2), 0)
        first, second = made[0].receive(100, 1), made[0].receive(100, 1)
        first.wait(LONG)
        with pytest.raises(WireError, match=r"recv \(test\): .* rank 1 .* field of 5008, not 8 to 100 bytes"):
            first.message(*IT)
        second.wait(LONG)
        assert torch.equal(second.message(*IT), message(50, 2))


@pytest.mark.parametrize("length", [0, 7, 2**20 + 1, 2**63, 2**64 - 1])
def test_no_memory_is_taken_for_a_length_that_cannot_be(length: int) -> None:
    one, other = socket.socketpair()
    mesh = Mesh({1: one})
    other.sendall(struct.pack("<Q", length) + bytes(100))
    receiving = mesh.receive(100, 1)
    receiving.wait(LONG)
    with pytest.raises(WireError, match=f"field of {length}, not 8 to 100 bytes"):
        receiving.message(*IT)
    mesh.close()
    other.close()


def test_nobody_is_connected_to_oneself_or_to_somebody_who_is_not_there() -> None:
    with meshes(2) as made:
        for peer in (0, 2, -1):
            with pytest.raises(ValueError, match="no connection"):
                made[0].send(message(1, 1), peer)
            with pytest.raises(ValueError, match="no connection"):
                made[0].receive(10, peer)


# --- how they meet -------------------------------------------------------------------------------------------


def test_strangers_are_not_let_in() -> None:
    """Those who say nothing, nonsense, or a rank without the secret; the ranks still find each other."""
    store, callers = dist.HashStore(), []

    def call_first() -> None:
        store.wait(["address/0"], LONG)
        _, port, host = store.get("address/0").decode().split(" ")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(30), meeting._HELLO.pack(bytes(meeting.SECRET), 1)):
            caller = socket.create_connection((host, int(port)))
            caller.sendall(said)
            callers.append(caller)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect_all, store, 0, 2, time.monotonic() + 30)
        call_first()
        second = pool.submit(connect_all, store, 1, 2, time.monotonic() + 30)
        links = [first.result(), second.result()]
    assert links[0][1].getpeername() == links[1][0].getsockname()
    for link in (*callers, links[0][1], links[1][0]):
        link.close()


def test_who_does_not_know_the_caller_is_not_talked_to() -> None:
    """Somebody else listens at the address that a rank left."""
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        store.set("address/0", f"{bytes(meeting.SECRET).hex()} {impostor.getsockname()[1]} 127.0.0.1")
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(connect_all, store, 1, 2, time.monotonic() + 30)
            link, _ = impostor.accept()
            link.sendall(bytes(meeting.SECRET))
            with pytest.raises(ConnectionError, match="handshake failed: unexpected peer"):
                calling.result()
            link.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_told(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises((TimeoutError, RuntimeError)):
        connect_all(dist.HashStore(), rank, 2, start + 0.3)
    assert time.monotonic() - start < 30


def test_a_rank_that_does_not_call_is_named() -> None:
    store = dist.HashStore()
    store.set("address/1", f"{bytes(meeting.SECRET).hex()} 9 127.0.0.1")
    with pytest.raises(TimeoutError, match="timed out waiting for rank 1 to connect"):
        connect_all(store, 0, 2, time.monotonic() + 1)


def test_a_rank_that_cannot_be_called_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has an address that is not its own; rank 2 would call nobody else."""
    store, start = dist.HashStore(), time.monotonic()
    monkeypatch.setattr(meeting, "local_address", lambda store: "203.0.113.1")
    with pytest.raises(OSError, match="assign requested address"):
        connect_all(store, 1, 3, start + 60)
    monkeypatch.undo()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(connect_all, store, rank, 3, start + 60) for rank in (0, 2)]
        for call in calls:
            with pytest.raises(ConnectionError, match="rank 1 has no reachable address"):
                call.result()
    assert time.monotonic() - start < 30


def test_the_interface_that_gloo_was_told_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert meeting.local_address(dist.HashStore()) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(OSError, match="No such device"):
        meeting.local_address(dist.HashStore())


def way_of_messages(connect: Callable[..., Communicator], stubborn: int | None, how: str, timeout: float) -> bool:
    """Whether there are connections for messages if one rank wants none, or cannot have any."""
    with pytest.MonkeyPatch.context() as patch:
        if stubborn is not None:
            patch.setattr(group, "TIMEOUTS", replace(TIMEOUTS, rendezvous=3.0))
        if dist.get_rank() == stubborn and how == "asked":
            patch.setenv("OKTOPK_MESSAGES", "gloo")
        if dist.get_rank() == stubborn and how == "cannot":
            patch.setattr(meeting, "local_address", lambda store: "203.0.113.1")
        if dist.get_rank() == stubborn and how == "breaks":
            patch.setattr(meeting, "local_address", lambda store: 1 / 0)
        comm: Any = connect(companion=True, timeout=timeout)
    assert comm.all_gather_ints([comm.rank], "here") == [[rank] for rank in range(comm.world)]
    return isinstance(comm._messages, Mesh)


WAYS = [(None, "", 30.0), (1, "asked", 30.0), (1, "asked", 8.0), (2, "cannot", 30.0), (0, "breaks", 30.0)]


@pytest.mark.parametrize(("stubborn", "how", "timeout"), WAYS)
def test_messages_go_through_gloo_on_all_ranks_or_on_none(stubborn: int | None, how: str, timeout: float) -> None:
    assert worlds.run("gloo", 3, way_of_messages, stubborn, how, timeout) == [stubborn is None] * 3


def late_then_again(connect: Callable[..., Communicator], done: str) -> list[str]:
    """Rank 0 waits in vain; what comes after that must not be taken for what did not come."""
    comm, said = connect(companion=True, timeout=60.0), []
    comm.timeout = 1.0  # to connect may take longer, on a busy machine
    if comm.rank == 0:
        for _ in range(2):
            with pytest.raises(CommError) as caught:
                comm.recv(100, 1, "late")
            said.append(f"{type(caught.value).__name__}: {caught.value}")
    else:
        assert worlds.wait_until(Path(done).exists, 60)
    return said


def test_after_a_timeout_nothing_is_received_any_more(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with worlds.start("gloo", 2, late_then_again, str(done)) as ranks:
        assert ranks.running([0], 60) == []
        done.touch()
        assert ranks.running([1], 60) == []
        first, second = ranks.outcome(0).value
    assert first.startswith("CommTimeout: recv (late): no answer from rank 1 within 1 s")
    assert second == "CommError: recv (late): the communicator is closed"


def test_a_way_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_MESSAGES", "pigeons")
    with pytest.raises(RuntimeError, match="OKTOPK_MESSAGES must be tcp or gloo, got 'pigeons'"):
        meeting.tcp_allowed()
    monkeypatch.setenv("OKTOPK_MESSAGES", "tcp")
    assert meeting.tcp_allowed()
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    assert not meeting.tcp_allowed()
