"""Connections for messages: nothing is lost or mixed up, and nobody waits for ever."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oktopk import CommError, Communicator, WireError
from oktopk.comm.messages import Closed, LostRank, TransferError, pack
from oktopk.comm.tcp.mesh import Mesh
from oktopk.metrics.traffic import Operation
from tests.support import worlds
from tests.support.tcp import meshes

SOON, LONG = timedelta(seconds=0.3), timedelta(seconds=30)
WORLDS = [2, 3, 5, 8]
IT = 1, Operation("recv", "test")
"""How errors call a message."""


def on_all(made: list[Mesh], job: Callable[[int, Mesh], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(job, range(len(made)), made, timeout=60))


def message(size: int, seed: int) -> Tensor:
    return pack(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8)))


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


class ClosedBySignal(socket.socket):
    """A signal comes while it sends or receives, and its handler closes the mesh."""

    mesh: Mesh

    def recv_into(self, *arguments: Any) -> int:  # type: ignore[override]
        self.mesh.close()
        return super().recv_into(*arguments)

    def send(self, *arguments: Any) -> int:
        self.mesh.close()
        return super().send(*arguments)


@pytest.mark.parametrize("begin", [lambda mesh: mesh.receive(100, 1), lambda mesh: mesh.send(message(9, 1), 1)])
def test_a_signal_may_close_it_while_it_moves_messages(begin: Callable[[Mesh], Any]) -> None:
    one, other = socket.socketpair()
    link = ClosedBySignal(fileno=one.detach())
    link.mesh = Mesh({1: link})
    other.sendall(bytes(100))
    with pytest.raises(Closed):
        begin(link.mesh).wait(LONG)
    other.close()


class ClosedMeanwhile(socket.socket):
    """Another thread closes it between two looks of this one."""

    def getsockopt(self, *arguments: Any) -> Any:
        self.close()
        return super().getsockopt(*arguments)


def test_a_look_at_a_link_that_is_closed_meanwhile_is_no_other_error() -> None:
    one, other = socket.socketpair()
    mesh = Mesh({1: ClosedMeanwhile(fileno=one.detach())})
    other.close()
    with pytest.raises(LostRank, match="connection closed by peer"):
        mesh.check_ranks()
    mesh.close()


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
