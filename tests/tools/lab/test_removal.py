"""The lab always goes away, and so do its jobs: by themselves, by an error, by a signal, or by the next lab."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from oktopk.tools.lab import JobFailed, JobTimeout, Lab, LabError
from tests.support import worlds
from tests.support.labs import inodes, needs_lab, processes_in, python, spaces_of
from tests.support.machine import heeded

pytestmark = pytest.mark.usefixtures("nothing_left")


# Jobs that go wrong.

STUBBORN = """
    import signal
    # A child in a session of its own, and nobody listens to SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    print("here", flush=True)
    if sys.argv[1:]: open(f"{sys.argv[1]}/{rank}", "w").close()
"""


@needs_lab
def test_a_failing_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    job = textwrap.dedent(STUBBORN) + (
        "for other in range(world): until(f'{sys.argv[1]}/{other}')\n"
        "if rank == 1: sys.exit('disk on fire')\n"
        "time.sleep(300)\n"
    )
    with Lab(hosts=3) as lab:
        inside = inodes(spaces_of(os.getpid()))
        with pytest.raises(
            JobFailed, match=r"^rank 1 ended with exit code 1; its last output:\nhere\ndisk on fire$"
        ) as e:
            lab.run([*python(job), str(tmp_path)], timeout=600, grace=0.5)
        assert not isinstance(e.value, TimeoutError)
        assert [r.code for r in e.value.results] == [-9, 1, -9]
        assert [r.stdout for r in e.value.results] == ["here\n"] * 3
        assert processes_in(inside) == []
        assert [r.code for r in lab.run(["true"], timeout=60)] == [0, 0, 0]  # the lab is as good as before


@needs_lab
def test_the_others_have_time_to_say_what_they_saw() -> None:
    job = """
        if rank == 0:
            peer = listen().accept()[0]
            os.kill(os.getpid(), 9)
        connect(0).recv(1)
        time.sleep(0.3)
        print("rank 0 is gone")
        sys.exit(4)
    """
    with Lab(hosts=2) as lab, pytest.raises(JobFailed, match=r"^rank 0 ended with signal 9; .*\nnothing$") as e:
        lab.run(python(job), timeout=60, grace=20)
    assert [(r.code, r.stdout) for r in e.value.results] == [(-9, ""), (4, "rank 0 is gone\n")]


@needs_lab
def test_a_command_that_does_not_exist() -> None:
    with (
        Lab(hosts=1) as lab,
        pytest.raises(JobFailed, match=r"rank 0 ended with exit code .*\n.*no-such-thing"),
    ):
        lab.run(["no-such-thing"], timeout=60)


@needs_lab
def test_a_job_that_is_late(tmp_path: Path) -> None:
    job = textwrap.dedent(STUBBORN) + "if rank: time.sleep(300)\n"
    with Lab(hosts=3) as lab:
        inside = inodes(spaces_of(os.getpid()))
        running = lab.start([*python(job), str(tmp_path)])
        assert worlds.wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
        with pytest.raises(
            JobTimeout, match=r"not finished within 5 s: rank 1, 2, killed\nrank 1 (.|\n)*here"
        ) as e:
            running.wait(timeout=5)
        assert isinstance(e.value, TimeoutError)
        assert [r.code for r in e.value.results] == [0, -9, -9]
        assert processes_in(inside) == []


@needs_lab
def test_a_good_job_leaves_no_children() -> None:
    with Lab(hosts=2) as lab:
        inside = inodes(spaces_of(os.getpid()))
        lab.run(python(STUBBORN), timeout=60)
        assert processes_in(inside) == []


# Nothing is left.


@needs_lab
def test_an_exception_removes_the_lab_and_the_job_in_it() -> None:
    with contextlib.suppress(ZeroDivisionError), Lab(hosts=2) as lab:
        inside = inodes(spaces_of(os.getpid()))
        running = lab.start(["sleep", "300"])
        assert worlds.wait_until(lambda: len(processes_in(inside)) == 2, 60)
        raise ZeroDivisionError
    assert spaces_of(os.getpid()) == []
    assert processes_in(inside) == []
    assert running.results is not None
    assert [r.code for r in running.results] == [-9, -9]
    for use in (lab.counters, lambda: lab.run(["true"]), lambda: lab.set_link(0, up=True)):
        with pytest.raises(LabError, match="the lab is not built: use it inside"):
            use()


OWNER = """
import os, sys
from oktopk.tools.lab import Lab
with Lab(2) as lab:
    if os.fork() == 0:
        sys.exit()  # a child leaves the lab alone
    os.wait()
    lab.run(["sh", "-c", "setsid sleep 300 & exec sleep 300"], timeout=200)
"""


@contextlib.contextmanager
def owner(code: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a lab of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)
        with Lab(1):
            pass  # sweeps what a broken lab has left, for the sake of the next test


def wait_for_job(process: subprocess.Popen[str]) -> set[int]:
    def busy() -> bool:
        return process.poll() is not None or len(processes_in(inodes(spaces_of(process.pid)))) == 4

    assert worlds.wait_until(busy, 60)
    assert process.poll() is None, process.stderr and process.stderr.read()
    assert len(spaces_of(process.pid)) == 3
    return inodes(spaces_of(process.pid))


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_owner_that_is_ended_removes_its_lab(number: signal.Signals) -> None:
    with heeded(number), owner(OWNER) as process:
        inside = wait_for_job(process)
        process.send_signal(number)
        assert process.wait(60) == -number
        assert spaces_of(process.pid) == []
        assert processes_in(inside) == []


@needs_lab
def test_the_next_lab_sweeps_what_a_killed_owner_left() -> None:
    with Lab(hosts=2) as bystander, owner(OWNER) as process:
        inside = wait_for_job(process)
        with Lab(hosts=1):
            assert len(spaces_of(process.pid)) == 3  # alive: not touched
            assert len(processes_in(inside)) == 4
        process.kill()
        process.wait(60)
        assert len(spaces_of(process.pid)) == 3
        assert len(processes_in(inside)) == 4
        with Lab(hosts=1):
            assert spaces_of(process.pid) == []
            assert processes_in(inside) == []
        bystander.run(["true"], timeout=60)


@needs_lab
def test_a_process_number_that_is_used_again_does_not_protect() -> None:
    stale, foreign = f"oktopk-{os.getpid()}-1-0-host0", f"oktopk-{os.getpid()}-something"
    for name in (stale, foreign):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with Lab(hosts=1):
            assert stale not in spaces_of(os.getpid())
            assert foreign in spaces_of(os.getpid())
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True)


@needs_lab
def test_an_owner_that_is_ended_while_it_builds(tmp_path: Path) -> None:
    """The command under way makes a namespace after the signal: it has to be waited for."""
    slow = tmp_path / "ip"
    slow.write_text(
        f"#!/bin/sh\ncase \"$*\" in 'netns add '*host1) touch {tmp_path}/now; sleep 1;; esac\n"
        f'exec {shutil.which("ip")} "$@"\n'
    )
    slow.chmod(0o755)
    with owner(OWNER, PATH=f"{tmp_path}:{os.environ['PATH']}") as process:
        assert worlds.wait_until((tmp_path / "now").exists, 60)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
        worlds.wait_until(lambda: bool(spaces_of(process.pid)), 1.5)
        assert spaces_of(process.pid) == []


@needs_lab
@pytest.mark.parametrize("action", [signal.SIG_IGN, lambda *_: None])
def test_signals_that_the_owner_handles_are_left_to_it(action: signal.Handlers) -> None:
    old = signal.signal(signal.SIGTERM, action)
    try:
        with Lab(hosts=1) as lab:
            os.kill(os.getpid(), signal.SIGTERM)
            lab.run(["true"], timeout=60)
        assert signal.getsignal(signal.SIGTERM) is action
    finally:
        signal.signal(signal.SIGTERM, old)
