"""A lab without root: the command runs itself again in a user namespace, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oktopk.tools.lab import hosts, lab_problem, user_namespace
from oktopk.tools.lab.namespaces import start_time
from tests.support.machine import children, heeded

UNPRIVILEGED = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
"""A user without any privilege who may still read the files of whoever runs the tests."""
LAB = [sys.executable, "-m", "oktopk.tools.lab", "--hosts", "2", "--rate", "100mbit", "--"]


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    if problem := user_namespace.user_namespace_problem():
        pytest.skip(problem)
    if subprocess.run([*UNPRIVILEGED, "unshare", "-Urnm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces cannot be nested here, so that no test can do without privileges")


def test_hosts_of_an_unprivileged_user_reach_each_other(tmp_path: Path) -> None:
    job = """
import os, socket, time
address, rank = (os.environ["MASTER_ADDR"], 4000), int(os.environ["RANK"])
if rank == 0:
    with socket.create_server(address) as server:
        print("got", server.accept()[0].recv(5).decode())
else:
    end = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(address, timeout=60) as other:
                other.sendall(b"hello")
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.01)
    open(f"{os.environ['OUT']}/written", "w").close()
"""
    done = subprocess.run(
        [*UNPRIVILEGED, *LAB, sys.executable, "-c", job], env=os.environ | {"OUT": str(tmp_path)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "got hello\n"
    assert (tmp_path / "written").stat().st_uid == os.getuid()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_all(number: signal.Signals, tmp_path: Path) -> None:
    job = f"touch {tmp_path}/$RANK; sleep 300"
    with (
        heeded(number),
        subprocess.Popen([*UNPRIVILEGED, *LAB, "sh", "-c", job], stderr=subprocess.DEVNULL) as lab,
    ):
        end = time.monotonic() + 100
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < end
            assert lab.poll() is None
            time.sleep(0.05)
        started = children(lab.pid)
        assert started
        lab.send_signal(number)
        assert lab.wait(60) != 0
        assert not [pid for pid in started if start_time(pid) is not None]


def test_where_user_namespaces_are_forbidden_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(user_namespace, "_ENTER", "echo 'Operation not permitted' >&2; exit 1")
    problem = lab_problem()
    assert problem == (
        "network namespaces need root, and this system allows no user namespaces (Operation not permitted): "
        "use sudo"
    )
    user_namespace.enter_user_namespace()  # returns: the caller finds out by lab_problem()


def test_a_program_of_ones_own_is_told_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert "enter_user_namespace()" in (lab_problem() or "")
