"""The lab itself: it builds the hosts and their links, changes them, and runs jobs on them."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .job import Job, RankResult
from .namespaces import LabError, birth, call, existing, remove, sweep, tool
from .owner import live, signals_held, watch_signals

INTERFACE, PORT = "eth0", 29500
MAX_HOSTS = 254
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_QUEUE = "100ms"
_GSO_BURST, _BURST_SECONDS = 128 * 1024, 1e-3
"""What tbf lets through at once: a packet before segmentation (64 KiB), or what passes between two timers."""


@dataclass(frozen=True)
class Counters:
    """What the kernel has counted on the interface of one host, headers of all layers included."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


def parse_rate(rate: str) -> int:
    """Bits per second.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    bits = round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if not 1e3 <= bits <= 1e11:
        raise ValueError(f"rate must be None or like '100mbit' or '1gbit', from 1kbit to 100gbit, got {rate!r}")
    return bits


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"a lab needs the network namespaces of Linux, and this is {sys.platform}"
    if os.geteuid():
        return "a lab needs root to make network namespaces: run as root, or with sudo"
    for name in ("ip", "tc"):
        if not tool(name):
            return f"a lab needs the command `{name}`: install the package iproute2"
    return None


def lab_problem() -> str | None:
    """Why no lab can be built on this machine, and what to do about it; None when one can. It tries."""
    if problem := _missing():
        return problem
    try:
        with Lab(hosts=1, rate="1gbit"):
            return None
    except LabError as error:
        return str(error)


class Lab:
    """Hosts with a full-duplex link each, for the length of a `with` block.

        with Lab(hosts=4, rate="1gbit") as lab:
            results = lab.run([sys.executable, "job.py"], timeout=120)

    A job is `ranks_per_host` processes on every host; those of host h have the ranks from h * ranks_per_host on.
    They share the link of their host, and reach each other without it. A rate of None is no limit.
    """

    _numbers = itertools.count()

    def __init__(self, hosts: int, rate: str | None = None, ranks_per_host: int = 1) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be in 1..{MAX_HOSTS}, got {hosts}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        if rate is not None:
            parse_rate(rate)
        if problem := _missing():
            raise LabError(problem)
        self.rate, self.ranks_per_host = rate, ranks_per_host
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._prefix = f"oktopk-{os.getpid()}-{birth(os.getpid())}-{next(self._numbers)}-"
        self._bridge = self._prefix + "bridge"
        self._hosts = [f"{self._prefix}host{host}" for host in range(hosts)]
        self._job: Job | None = None

    def __enter__(self) -> Lab:
        if self in live:
            raise LabError("this lab is built already: make another one")
        sweep()
        watch_signals(True)
        with signals_held():
            live.add(self)
            try:
                self._build()
                self.set_rate(self.rate)
            except BaseException as error:
                self.close()
                if isinstance(error, LabError):
                    hint = "a container must be privileged, and the kernel have veth, bridge and tbf"
                    raise LabError(f"cannot build the lab: {error} ({hint})") from error
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the lab, and remove it."""
        if self not in live:
            return
        with signals_held():
            remove([name for name, _ in existing(self._prefix)])
            if self._job:
                self._job.end()
            live.discard(self)
        if not live:
            watch_signals(False)

    def set_rate(self, rate: str | None) -> None:
        """Change the rate of all links, also while a job is running. None is no limit."""
        if rate is None:
            discipline = ["noqueue"]
        else:
            bits = parse_rate(rate)
            burst = max(_GSO_BURST, round(bits / 8 * _BURST_SECONDS))
            # With a handle, a new rate changes the old queue instead of dropping what is in it.
            discipline = ["handle", "1:", "tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", _QUEUE]
        self._check_open()
        for host, space in enumerate(self._hosts):
            call("tc", "-n", space, "qdisc", "replace", "dev", INTERFACE, "root", *discipline)
            call("tc", "-n", self._bridge, "qdisc", "replace", "dev", f"p{host}", "root", *discipline)
        self.rate = rate

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull the cable of a host, or plug it in again."""
        self._check_open()
        if not 0 <= host < len(self._hosts):
            raise ValueError(f"host must be in 0..{len(self._hosts) - 1}, got {host}")
        call("ip", "-n", self._bridge, "link", "set", f"p{host}", "up" if up else "down")

    def counters(self) -> list[Counters]:
        """Per host, since the lab was built. A packet is what the kernel handles at once: up to 64 KiB of TCP."""
        self._check_open()
        answers = [call("ip", "-n", space, "-j", "-s", "link", "show", INTERFACE) for space in self._hosts]
        both = [json.loads(answer)[0]["stats64"] for answer in answers]
        return [Counters(x["tx"]["bytes"], x["tx"]["packets"], x["rx"]["bytes"], x["rx"]["packets"]) for x in both]

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, stream: bool = False) -> Job:
        """Start the command for every rank, set up for `torch.distributed.init_process_group("gloo")`.

        `stream` shows what rank 0 writes as it comes, while `Job.wait` waits.
        """
        self._check_open()
        if self._job and self._job.results is None:
            raise LabError("the hosts are busy: a lab runs one job at a time")
        with signals_held():
            spaces = [space for space in self._hosts for _ in range(self.ranks_per_host)]
            self._job = Job(command, spaces, self._environments(env or {}), stream)
        return self._job

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 600.0,
        grace: float = 5.0,
        env: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> list[RankResult]:
        """`start` and `wait`: the results in rank order, or JobFailed, or JobTimeout."""
        return self.start(command, env=env, stream=stream).wait(timeout, grace)

    def _build(self) -> None:
        call("ip", "netns", "add", self._bridge)
        # Without IPv6 and snooping the bridge never speaks itself, and the counters show the job alone.
        speaks = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
        call("ip", "netns", "exec", self._bridge, "sh", "-c", f"[ ! -w {speaks} ] || echo 1 > {speaks}")
        in_bridge = ["-n", self._bridge, "link"]
        call("ip", *in_bridge, "add", "br0", "type", "bridge", "mcast_snooping", "0")
        call("ip", *in_bridge, "set", "br0", "up")
        for host, (space, address) in enumerate(zip(self._hosts, self.addresses, strict=True)):
            call("ip", "netns", "add", space)
            call("ip", *in_bridge, "add", f"p{host}", "type", "veth", "peer", "name", INTERFACE, "netns", space)
            call("ip", *in_bridge, "set", f"p{host}", "master", "br0", "up")
            call("ip", "-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
            call("ip", "-n", space, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            call("ip", "-n", space, "link", "set", "lo", "up")

    def _environments(self, given: Mapping[str, str]) -> list[dict[str, str]]:
        """Of each rank."""
        world = len(self._hosts) * self.ranks_per_host
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        shared = {
            **defaults,
            **inherited,
            **given,
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        return [
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % self.ranks_per_host)} for rank in range(world)
        ]

    def _check_open(self) -> None:
        if self not in live:
            raise LabError("the lab is not built: use it inside `with Lab(...) as lab:`")
