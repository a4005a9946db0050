"""The lab: its hosts are alone with each other, its links are as slow as they say, and its jobs are heard."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from oktopk.tools.lab import Lab, LabError, lab_problem, parse_rate
from oktopk.tools.lab.__main__ import main
from tests.support import worlds
from tests.support.labs import machine_interfaces, needs_lab, python, spaces_of

pytestmark = pytest.mark.usefixtures("nothing_left")
BURST = 128 * 1024
MEGABYTES_4 = 4 * 2**20


# What it is.


@pytest.mark.parametrize(
    "rate", ["", "fast", "1", "-1gbit", "0gbit", "1 gbit", "1gbps", "999gbit", "1gbit; ls", 5]
)
def test_a_rate_that_is_none(rate: str) -> None:
    with pytest.raises(ValueError, match="rate must be like 100mbit or 1gbit"):
        Lab(2, rate)


@pytest.mark.parametrize("hosts", [0, -1, 255])
def test_a_number_of_hosts_that_is_none(hosts: int) -> None:
    with pytest.raises(ValueError, match=rf"hosts must be in 1..254, got {hosts}"):
        Lab(hosts)


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 10**8), ("1gbit", 10**9), ("64kbit", 64_000)])
def test_rates_are_decimal(rate: str, bits: int) -> None:
    assert parse_rate(rate) == bits


@needs_lab
def test_hosts_reach_each_other_and_nothing_else() -> None:
    job = """
        import errno
        server = listen()
        peers = [connect(host) for host in range(world) if host != rank]
        for _ in peers: server.accept()
        assert sorted(name for _, name in socket.if_nameindex()) == ["eth0", "lo"]
        routes = [line.split()[1:3] for line in open("/proc/net/route").readlines()[1:]]
        assert routes == [["00004D0A", "00000000"]]  # 10.77.0.0, no gateway
        try:
            socket.create_connection(("192.0.2.1", 80), timeout=5)
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    before = machine_interfaces()
    with Lab(hosts=4) as lab:
        assert machine_interfaces() == before
        results = lab.run(python(job), timeout=60)
    assert [(r.rank, r.code, r.stdout) for r in results] == [(rank, 0, "ENETUNREACH\n") for rank in range(4)]


@needs_lab
def test_gloo_works_without_further_settings() -> None:
    job = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        x = torch.full((1000,), float(rank + 1))
        dist.all_reduce(x)
        print(x.sum().item(), os.environ["OMP_NUM_THREADS"], os.environ["LOCAL_RANK"], torch.get_num_threads())
        dist.destroy_process_group()
    """
    with Lab(hosts=3) as lab:
        results = lab.run(python(job), timeout=60, env={"OMP_NUM_THREADS": "2"})
        sent = [host.sent_bytes for host in lab.counters()]
    assert [r.stdout for r in results] == ["6000.0 2 0 2\n"] * 3
    assert min(sent) > 4000


@needs_lab
def test_what_the_job_finds_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's own names win; a launcher around the owner must not confuse the ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "example.invalid")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = """
        names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS COLOUR".split()
        print(*[os.environ[name] for name in names], "TORCHELASTIC_USE_AGENT_STORE" in os.environ)
    """
    with Lab(hosts=2) as lab:
        results = lab.run(python(job), timeout=60, env={"COLOUR": "blue", "RANK": "77"})
    assert [r.stdout for r in results] == [f"{rank} 2 0 10.77.0.1 eth0 1 blue False\n" for rank in range(2)]


@needs_lab
def test_rank_0_is_heard_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = """
        print("héllo from", rank)
        print("oops", file=sys.stderr)
        until(sys.argv[1])
    """
    heard = []

    def listen_in() -> bool:
        heard.append(capsys.readouterr())
        return "héllo from 0" in "".join(h.out for h in heard)

    with Lab(hosts=2) as lab:
        running = lab.start([*python(job), str(tmp_path / "go")], stream=True)
        with pytest.raises(LabError, match="one job at a time"):
            lab.start(["true"])
        assert worlds.wait_until(lambda: running._show() or listen_in(), 60)
        (tmp_path / "go").touch()
        results = running.wait(timeout=60)
    heard.append(capsys.readouterr())
    assert "".join(h.out for h in heard) == "héllo from 0\n"
    assert "".join(h.err for h in heard) == "oops\n"
    assert results[1].stdout == "héllo from 1\n"


# The links.

TRANSFER = """
    # Rank 0 sends to the others ("out"), or they to it ("in"). It prints the time at which all was there.
    way, folder, size, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    server = listen() if rank == 0 else None
    peers = [server.accept()[0] for _ in range(world - 1)] if rank == 0 else [connect(0)]
    for number in range(rounds):
        if rank == 0: open(f"{folder}/ready{number}", "w").close()
        until(f"{folder}/go{number}")
        if (way == "out") == (rank == 0):
            import threading
            threads = [threading.Thread(target=peer.sendall, args=(bytes(size),)) for peer in peers]
            for thread in threads: thread.start()
            for thread in threads: thread.join(60)
        else:
            for peer in peers: read(peer, size)
        if way == "out":  # one byte back says so
            for peer in peers: read(peer, 1) if rank == 0 else peer.sendall(b"x")
        if rank == 0: print(time.monotonic())
"""


def transfer(lab: Lab, way: str, folder: Path, rates: list[str | None]) -> list[float]:
    """Seconds for 4 MB between rank 0 and each of the others, at one rate after the other."""
    job = lab.start([*python(TRANSFER), way, str(folder), str(MEGABYTES_4), str(len(rates))])
    starts = []
    for number, rate in enumerate(rates):
        assert worlds.wait_until((folder / f"ready{number}").exists, 60)
        lab.set_rate(rate)
        starts.append(time.monotonic())
        (folder / f"go{number}").touch()
    ends = map(float, job.wait(timeout=60)[0].stdout.split())
    return [end - start for start, end in zip(starts, ends, strict=True)]


@needs_lab
@pytest.mark.parametrize("way", ["out", "in"])
def test_no_link_is_faster_than_its_rate(way: str, tmp_path: Path) -> None:
    """Bytes through a bucket in t seconds: at most burst + rate · t. Rank 0 sends, or receives, to or from two."""
    rates: list[str | None] = [None, "100mbit", "40mbit", None]
    with Lab(hosts=3, rate="1gbit") as lab:
        seconds = transfer(lab, way, tmp_path, rates)
        hub, *others = lab.counters()
        assert disciplines(lab) == {"noqueue"}
    for took, rate in zip(seconds, rates, strict=True):
        if rate is not None:
            assert took >= (2 * MEGABYTES_4 - BURST) * 8 / parse_rate(rate), (way, rate)
    moved = hub.sent_bytes if way == "out" else hub.received_bytes
    assert moved >= 2 * MEGABYTES_4 * len(rates)
    for other in others:
        assert (other.received_bytes if way == "out" else other.sent_bytes) >= MEGABYTES_4 * len(rates)


def disciplines(lab: Lab) -> set[str]:
    kinds = set()
    for name in spaces_of(os.getpid()):
        answer = subprocess.run(
            ["ip", "netns", "exec", name, "tc", "-j", "qdisc"], capture_output=True, check=True
        )
        kinds |= {qdisc["kind"] for qdisc in json.loads(answer.stdout) if qdisc["dev"] not in ("lo", "br0")}
    return kinds


@needs_lab
def test_a_rate_is_set_on_both_ends_of_every_link() -> None:
    with Lab(hosts=2, rate="10mbit") as lab:
        assert disciplines(lab) == {"tbf"}
        with pytest.raises(ValueError, match="rate must be like"):
            lab.set_rate("slow")
        assert lab.rate == "10mbit"


@needs_lab
def test_what_one_host_sends_the_other_receives() -> None:
    job = """
        if rank == 0:
            read(listen().accept()[0], 100_000)
        else:
            connect(0).sendall(bytes(100_000))
    """
    with Lab(hosts=2) as lab:
        assert {(c.sent_bytes, c.received_bytes) for c in lab.counters()} == {(0, 0)}
        lab.run(python(job), timeout=60)
        a, b = lab.counters()
    assert (a.sent_bytes, a.sent_packets) == (b.received_bytes, b.received_packets)
    assert (b.sent_bytes, b.sent_packets) == (a.received_bytes, a.received_packets)
    assert 100_000 < b.sent_bytes < 120_000
    assert 0 < a.sent_packets < 1000


@needs_lab
def test_a_link_goes_down_and_comes_back(tmp_path: Path) -> None:
    job = """
        folder, seconds = sys.argv[1], float(sys.argv[2])
        def meet(place):
            open(f"{folder}/{place}{rank}", "w").close()
            for host in range(world): until(f"{folder}/{place}{host}")
        reached, server = [], listen()
        meet("listening")
        for host in range(world):
            try:
                connect(host, seconds=seconds)
                reached.append(host)
            except OSError:
                pass
        meet("done")
        print(*reached)
    """
    with Lab(hosts=3) as lab:
        for name, up, seconds, seen in (
            ("down", False, 1.5, ["0 2", "1", "0 2"]),
            ("up", True, 40, ["0 1 2"] * 3),
        ):
            (tmp_path / name).mkdir()
            lab.set_link(1, up=up)
            results = lab.run([*python(job), str(tmp_path / name), str(seconds)], timeout=60)
            assert [r.stdout.strip() for r in results] == seen, name
        with pytest.raises(ValueError, match=r"host must be in 0..2, got 3"):
            lab.set_link(3, up=False)


@needs_lab
def test_two_labs_side_by_side_do_not_see_each_other() -> None:
    job = """
        server = listen()
        if rank == 0:
            for _ in range(world - 1):
                server.accept()[0].sendall(sys.argv[1].encode())
        else:
            print(connect(0).recv(10).decode())
    """
    with Lab(hosts=2) as one, Lab(hosts=3) as two:
        assert len(spaces_of(os.getpid())) == 3 + 4
        jobs = [one.start([*python(job), "red"]), two.start([*python(job), "blue"])]
        red, blue = (job.wait(60) for job in jobs)
        with pytest.raises(LabError, match="this lab is already built"), one:
            pass
        two.run(["true"], timeout=60)
        one.close()
        assert len(spaces_of(os.getpid())) == 4
        two.run(["true"], timeout=60)
    assert [r.stdout for r in red] == ["", "red\n"]
    assert [r.stdout for r in blue] == ["", "blue\n", "blue\n"]


# Where there can be no lab.


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run as root" in (lab_problem() or "")
    with pytest.raises(LabError, match="run as root"):
        Lab(hosts=2)


def test_without_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("oktopk.tools.lab.hosts.find_tool", lambda name: None if name == "tc" else "/bin/true")
    assert "command `tc` not found: install the package iproute2" in (lab_problem() or "")


@needs_lab
def test_a_kernel_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a lab is removed again."""
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'qdisc kind is unknown' >&2; exit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    problem = lab_problem()
    assert problem is not None
    assert "qdisc kind is unknown" in problem
    assert "privileged" in problem
    with (
        pytest.raises(LabError, match=r"cannot build the lab: `tc .*` failed: qdisc kind is unknown"),
        Lab(hosts=2),
    ):
        pass


# The command line.


@needs_lab
def test_the_command_runs_a_job(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "2", "--rate", "1gbit", "--timeout", "60", "--", "sh", "-c", "echo rank $RANK"]) == 0
    out, err = capfd.readouterr()
    assert out == "rank 0\n"
    assert err.startswith("host 0: 0.00 MB sent, 0.00 MB received\nhost 1: ")


@needs_lab
def test_the_command_reports_failure(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "2", "--grace", "1", "--", "sh", "-c", "echo no luck; exit $RANK"]) == 1
    assert "rank 1 ended with exit code 1; its last output:\nno luck" in capfd.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["--rate", "fast", "--", "true"])
    assert exit_.value.code == 2
    assert "rate must be like" in capfd.readouterr().err
