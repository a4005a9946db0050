"""The Lab: builds hosts and links, changes their rates, and runs jobs on them."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oktopk.utils.secret import SECRET, new_secret

from .cleanup import hold_signals, live_labs, watch_signals
from .job import Job, RankResult
from .namespaces import LabError, call, find_tool, list_namespaces, remove, remove_orphans, start_time
from .user_namespace import user_namespace_problem

INTERFACE, PORT = "eth0", 29500
MAX_HOSTS = 254
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_NEARLY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])i?[bits/p]*", re.IGNORECASE)
_QUEUE = "100ms"
_GSO_BURST, _BURST_SECONDS = 128 * 1024, 1e-3
"""Burst size of tbf: a packet before segmentation (64 KiB), or what passes between two timer ticks."""


@dataclass(frozen=True)
class Counters:
    """The kernel's counters of one host's interface, headers of all layers included."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


def interface_sent_bytes(in_lab: bool) -> int | None:
    """Bytes that the interface of this host has sent, as the kernel counts them; None outside of a lab."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text()) if in_lab else None


def parse_rate(rate: str) -> int:
    """Bits per second.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    bits = _bits(rate) if isinstance(rate, str) else None
    if bits is None:
        raise ValueError(f"rate must be like 100mbit or 1gbit, from 1kbit to 100gbit, got {rate!r}{_meant(rate)}")
    return bits


def _bits(rate: str) -> int | None:
    match = _RATE.fullmatch(rate)
    bits = round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    return bits if 1e3 <= bits <= 1e11 else None


def _meant(rate: str) -> str:
    """The rate that was probably meant.

    >>> _meant("100Mbps"), _meant("1 gibt"), _meant("fast"), _meant("999gbit")
    (': did you mean 100mbit?', ': did you mean 1gbit?', '', '')
    """
    found = _NEARLY.fullmatch(str(rate).strip())
    other = f"{found[1]}{found[2].lower()}bit" if found else ""
    return f": did you mean {other}?" if _bits(other) else ""


def _missing_requirement() -> str | None:
    if sys.platform != "linux":
        return f"network namespaces need Linux, but this is {sys.platform}"
    if os.geteuid():
        return user_namespace_problem() or (
            "network namespaces need root: run as root, or call enter_user_namespace() at the start of the program"
        )
    for name in ("ip", "tc"):
        if not find_tool(name):
            return f"command `{name}` not found: install the package iproute2"
    return None


def lab_problem() -> str | None:
    """Try to build a lab; return why that fails and what to do about it, or None."""
    if problem := _missing_requirement():
        return problem
    try:
        with Lab(hosts=1, rate="1gbit"):
            return None
    except LabError as error:
        return str(error)


class Lab:
    """Hosts with one full-duplex link each, for the duration of a `with` block.

        with Lab(hosts=4, rate="1gbit") as lab:
            results = lab.run([sys.executable, "job.py"], timeout=120)

    A job runs `ranks_per_host` processes on every host; those of host h have the ranks from h * ranks_per_host on.
    They share the link of their host, and reach each other without it. A rate of None means no limit.
    """

    _numbers = itertools.count()

    def __init__(self, hosts: int, rate: str | None = None, ranks_per_host: int = 1) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be in 1..{MAX_HOSTS}, got {hosts}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        if rate is not None:
            parse_rate(rate)
        if problem := _missing_requirement():
            raise LabError(problem)
        self.rate, self.ranks_per_host = rate, ranks_per_host
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._prefix = f"oktopk-{os.getpid()}-{start_time(os.getpid())}-{next(self._numbers)}-"
        self._bridge = self._prefix + "bridge"
        self._hosts = [f"{self._prefix}host{host}" for host in range(hosts)]
        self._job: Job | None = None

    def __enter__(self) -> Lab:
        if self in live_labs:
            raise LabError("this lab is already built: create another one")
        remove_orphans()
        watch_signals(True)
        with hold_signals():
            live_labs.add(self)
            try:
                self._build()
                self.set_rate(self.rate)
            except BaseException as error:
                self.close()
                if isinstance(error, LabError):
                    hint = "containers must be privileged, and the kernel needs veth, bridge and tbf"
                    raise LabError(f"cannot build the lab: {error} ({hint})") from error
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes in the lab, and remove it."""
        if self not in live_labs:
            return
        with hold_signals():
            remove([name for name, _ in list_namespaces(self._prefix)])
            if self._job:
                self._job.end()
            live_labs.discard(self)
        if not live_labs:
            watch_signals(False)

    def set_rate(self, rate: str | None) -> None:
        """Change the rate of all links, even while a job is running. None means no limit."""
        if rate is None:
            discipline = ["noqueue"]
        else:
            bits = parse_rate(rate)
            burst = max(_GSO_BURST, round(bits / 8 * _BURST_SECONDS))
            # With a handle, a new rate changes the queue instead of dropping its packets.
            discipline = ["handle", "1:", "tbf", "rate", f"{bits}bit", "burst", str(burst), "latency", _QUEUE]
        self._check_open()
        for host, space in enumerate(self._hosts):
            call("tc", "-n", space, "qdisc", "replace", "dev", INTERFACE, "root", *discipline)
            call("tc", "-n", self._bridge, "qdisc", "replace", "dev", f"p{host}", "root", *discipline)
        self.rate = rate

    def set_link(self, host: int, *, up: bool) -> None:
        """Disconnect a host, or connect it again."""
        self._check_open()
        if not 0 <= host < len(self._hosts):
            raise ValueError(f"host must be in 0..{len(self._hosts) - 1}, got {host}")
        call("ip", "-n", self._bridge, "link", "set", f"p{host}", "up" if up else "down")

    def counters(self) -> list[Counters]:
        """Counters of each host since the lab was built. A packet is what the kernel handles at once: up to 64
        KiB.
        """
        self._check_open()
        answers = [call("ip", "-n", space, "-j", "-s", "link", "show", INTERFACE) for space in self._hosts]
        both = [json.loads(answer)[0]["stats64"] for answer in answers]
        return [Counters(x["tx"]["bytes"], x["tx"]["packets"], x["rx"]["bytes"], x["rx"]["packets"]) for x in both]

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, stream: bool = False) -> Job:
        """Start the command on every rank, with the environment for
        `torch.distributed.init_process_group("gloo")`.

        With `stream`, Job.wait() shows the output of rank 0 as it comes.
        """
        self._check_open()
        if self._job and self._job.results is None:
            raise LabError("a job is running: a lab runs one job at a time")
        with hold_signals():
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
        """Start a job and wait for it; returns the results in rank order, or raises JobFailed or JobTimeout."""
        return self.start(command, env=env, stream=stream).wait(timeout, grace)

    def _build(self) -> None:
        call("ip", "netns", "add", self._bridge)
        # Without IPv6 and snooping the bridge sends nothing, and the counters show the job alone.
        switch = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
        call("ip", "netns", "exec", self._bridge, "sh", "-c", f"[ ! -w {switch} ] || echo 1 > {switch}")
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
        """The environment of each rank."""
        world = len(self._hosts) * self.ranks_per_host
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", SECRET: new_secret()}
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
        if self not in live_labs:
            raise LabError("the lab is not built: use it inside `with Lab(...) as lab:`")
