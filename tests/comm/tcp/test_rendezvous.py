"""How ranks find each other: they connect or fall back to gloo together, and secrets must be the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from oktopk import CommError, Communicator
from oktopk.comm.tcp import meeting, rendezvous
from oktopk.comm.tcp.mesh import Mesh
from oktopk.comm.tcp.rendezvous import Introduction, find_obstacle, find_problem, parse_introductions, session_key
from oktopk.utils.timeouts import TIMEOUTS
from tests.support import worlds

A, B = Introduction("1", "a", "x", ("10.0.0.1", 1)), Introduction("2", "b", "x", ("10.0.0.2", 2))


def way_of_messages(connect: Callable[..., Communicator], stubborn: int | None, how: str, timeout: float) -> bool:
    """Whether there are connections for messages if one rank wants none, or cannot have any."""
    with pytest.MonkeyPatch.context() as patch:
        if stubborn is not None:
            patch.setattr(meeting, "TIMEOUTS", replace(TIMEOUTS, rendezvous=3.0))
        if dist.get_rank() == stubborn and how == "asked":
            patch.setenv("OKTOPK_MESSAGES", "gloo")
        if dist.get_rank() == stubborn and how == "cannot":
            patch.setattr(rendezvous, "local_address", lambda store: "203.0.113.1")
        if dist.get_rank() == stubborn and how == "breaks":
            patch.setattr(rendezvous, "local_address", lambda store: 1 / 0)
        comm: Any = connect(companion=True, timeout=timeout)
    assert comm.all_gather_ints([comm.rank], "here") == [[rank] for rank in range(comm.world)]
    return isinstance(comm._messages, Mesh)


WAYS = [(None, "", 30.0), (1, "asked", 30.0), (1, "asked", 8.0), (2, "cannot", 30.0), (0, "breaks", 30.0)]


@pytest.mark.parametrize(("stubborn", "how", "timeout"), WAYS)
def test_messages_go_through_gloo_on_all_ranks_or_on_none(stubborn: int | None, how: str, timeout: float) -> None:
    assert worlds.run("gloo", 3, way_of_messages, stubborn, how, timeout) == [stubborn is None] * 3


def test_a_way_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OKTOPK_MESSAGES", "pigeons")
    with pytest.raises(RuntimeError, match="OKTOPK_MESSAGES must be tcp or gloo, got 'pigeons'"):
        rendezvous.tcp_allowed()
    monkeypatch.setenv("OKTOPK_MESSAGES", "tcp")
    assert rendezvous.tcp_allowed()
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    assert not rendezvous.tcp_allowed()


def test_the_interface_that_gloo_was_told_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert rendezvous.local_address(dist.HashStore()) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(OSError, match="No such device"):
        rendezvous.local_address(dist.HashStore())


def test_introductions_arrive_as_they_were_sent() -> None:
    assert parse_introductions([A.to_bytes(), B.to_bytes()]) == [A, B]


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"{}", b"7", b'{"endpoint": [1]}', b"\xff"])
def test_an_unreadable_introduction_is_an_error_that_names_the_rank(text: bytes) -> None:
    with pytest.raises(CommError, match="rank 1 sent an unreadable introduction"):
        parse_introductions([A.to_bytes(), text])


def test_a_loopback_address_is_no_reason_to_wait_for_other_hosts() -> None:
    hidden = replace(A, endpoint=("127.0.1.1", 5))
    assert find_obstacle([A, B]) is None
    assert find_obstacle([hidden, replace(hidden, nonce="2")]) is None
    assert "rank 0 found a loopback address" in str(find_obstacle([hidden, B]))
    assert "GLOO_SOCKET_IFNAME" in str(find_obstacle([B, hidden]))
    assert find_obstacle([A, replace(B, endpoint=None)]) == ""
    assert "rank 1 has no reachable address: gone" in str(find_obstacle([A, replace(B, obstacle="gone")]))


def test_the_key_is_new_in_every_session_and_needs_the_secret() -> None:
    keys = {session_key(b"s", [A, B]), session_key(b"t", [A, B]), session_key(None, [A, B])}
    keys.add(session_key(b"s", [replace(A, nonce="3"), B]))
    assert len(keys) == 4
    assert session_key(b"s", [A, B]) == session_key(b"s", [A, B])


def test_which_secrets_do_not_fit_is_said() -> None:
    assert find_problem([A, B]) is None
    assert find_problem([replace(A, fingerprint=None), replace(B, fingerprint=None)]) is None
    assert "no secret on rank 1, but on rank 0" in str(find_problem([A, replace(B, fingerprint=None)]))
    assert "rank 0 has another secret than rank 1" in str(find_problem([A, replace(B, fingerprint="y")]))
    assert find_problem([A, replace(B, problem="no")]) == "rank 1: no"


SECRETS: dict[str, tuple[list[dict[str, str]], str | None]] = {
    "the same": ([{"OKTOPK_SECRET": "s" * 32}] * 3, None),
    "none": ([{}] * 3, None),
    "one without": ([{"OKTOPK_SECRET": "s" * 32}, {"OKTOPK_SECRET": "s" * 32}, {}], "no secret on rank 2"),
    "one differs": ([{"OKTOPK_SECRET": "s" * 32}, {"OKTOPK_SECRET": "t" * 32}, {"OKTOPK_SECRET": "s" * 32}],
                    "rank 0 has another secret than rank 1"),
    "required": ([{}, {"OKTOPK_REQUIRE_SECRET": "1"}, {}], "rank 1: OKTOPK_REQUIRE_SECRET is 1, but there is no"),
    "no file": ([{"OKTOPK_SECRET": "s" * 32}, {"OKTOPK_SECRET_FILE": "/nowhere"}, {"OKTOPK_SECRET": "s" * 32}],
                "rank 1: OKTOPK_SECRET_FILE: cannot read /nowhere"),
    "required, but gloo": ([{"OKTOPK_SECRET": "s" * 32, "OKTOPK_REQUIRE_SECRET": "1"},
                            {"OKTOPK_SECRET": "s" * 32, "OKTOPK_MESSAGES": "gloo"},
                            {"OKTOPK_SECRET": "s" * 32}], "gloo would carry the messages"),
}  # fmt: skip


def start_with(connect: Callable[..., Communicator], environments: list[dict[str, str]]) -> tuple[str, float]:
    """The error at the start, or where messages go; and the seconds that it took."""
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environments[dist.get_rank()].items():
            patch.setenv(name, value)
        try:
            comm: Any = connect(companion=True, timeout=60.0)
        except CommError as error:
            return str(error), time.monotonic() - start
    assert comm.all_gather_ints([comm.rank], "here") == [[0], [1], [2]]
    return type(comm._messages).__name__, time.monotonic() - start


@pytest.mark.parametrize("case", SECRETS)
def test_secrets_that_differ_are_one_error_on_all_ranks_at_once(case: str) -> None:
    environments, wanted = SECRETS[case]
    found = worlds.run("gloo", 3, start_with, environments)
    assert len({text for text, _ in found}) == 1
    assert (wanted or "Mesh") in found[0][0]
    assert max(seconds for _, seconds in found) < 15, "long before the timeout, also on a busy machine"
