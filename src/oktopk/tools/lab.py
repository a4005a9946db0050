"""A small cluster on one machine: hosts in network namespaces, joined by links of a chosen rate.

      host 0            host 1            host 2        a namespace each
      10.77.0.1         10.77.0.2         10.77.0.3
      eth0 | tbf        eth0 | tbf        eth0 | tbf    limits what the host sends
           |                 |                 |
      tbf  | p0         tbf  | p1         tbf  | p2     limits what it receives
    ------------------------------------------------    a bridge, in a namespace of its own

Nothing is attached to the namespace of the machine, so no packet gets in or out. A namespace is named after the
process that owns it: what a killed owner leaves behind is removed by the next lab.
"""

from __future__ import annotations

import argparse
import atexit
import codecs
import contextlib
import ctypes
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from ..errors import OkTopkError

INTERFACE, PORT = "eth0", 29500
MAX_HOSTS = 254
_SPACES = Path("/var/run/netns")
_NAME = re.compile(r"oktopk-(?P<pid>\d+)-(?P<born>\d+)-\d+-(?:bridge|host\d+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_POLL, _COMMAND_TIMEOUT, _KILL_TIMEOUT = 0.02, 30.0, 10.0
_PATIENCE = 1.0
"""Seconds between asking a process to end and killing it."""
_TAIL = 2000
_QUEUE = "100ms"
_GSO_BURST, _BURST_SECONDS = 128 * 1024, 1e-3
"""What tbf lets through at once: a packet before segmentation (64 KiB), or what passes between two timers."""


class LabError(OkTopkError):
    """The lab cannot be built or used."""


class JobFailed(LabError):
    """A rank of a job failed; `results` has what every rank has said."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


class JobTimeout(JobFailed, TimeoutError):
    """A job was not done in time."""


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. A negative code is the number of the signal that ended it."""

    rank: int
    code: int
    stdout: str
    stderr: str

    def describe(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        said = (self.stdout + self.stderr).strip()[-_TAIL:] or "nothing"
        return f"rank {self.rank} ended with {how}; its last output:\n{said}"


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


# Namespaces and the processes inside.


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _call(tool: str, *arguments: str) -> str:
    """What `ip` or `tc` answers."""
    run = subprocess.run(
        [_tool(tool) or tool, *arguments], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False
    )
    if run.returncode:
        raise LabError(f"`{tool} {' '.join(arguments)}` failed: {run.stderr.strip()}")
    return run.stdout


def _birth(pid: int) -> int | None:
    """When a process started, in clock ticks; None once it has ended. Tells two users of one number apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _inside(names: Collection[str]) -> list[int]:
    """The processes in these namespaces."""
    wanted = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            wanted.add(os.stat(_SPACES / name)[1:3])  # inode and device
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # It has ended, or belongs to somebody who keeps even root out; ours do not.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}/ns/net")[1:3] in wanted:
                pids.append(int(pid))
    return pids


def _clear(names: Collection[str], patience: float) -> None:
    """End every process in these namespaces, children of children too: they are asked, then killed."""
    start, number = time.monotonic(), signal.SIGTERM
    asked: set[int] = set()
    while pids := _inside(names):
        waited = time.monotonic() - start
        if waited > patience + _KILL_TIMEOUT:
            raise LabError(f"processes {pids} of the lab do not end, not even by SIGKILL")
        if waited >= patience:
            number, asked = signal.SIGKILL, set()
        for pid in set(pids) - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            asked.add(pid)
        time.sleep(0.005)


def _remove(names: Collection[str]) -> None:
    """By system calls alone: a process cannot start another one while it exits."""
    _clear(names, patience=0.0)
    libc = ctypes.CDLL(None, use_errno=True)
    for path in map(_SPACES.joinpath, names):
        lazily = 2
        if libc.umount2(os.fsencode(path), lazily) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
            raise LabError(f"cannot unmount {path}: {os.strerror(ctypes.get_errno())}")
        path.unlink(missing_ok=True)


def _existing(prefix: str = "") -> list[tuple[str, re.Match[str]]]:
    """The namespaces of labs, by name."""
    names = sorted(os.listdir(_SPACES)) if _SPACES.is_dir() else []
    return [(name, match) for name in names if name.startswith(prefix) and (match := _NAME.fullmatch(name))]


def _sweep() -> None:
    """Remove the labs whose owner is no more."""
    _remove([name for name, match in _existing() if _birth(int(match["pid"])) != int(match["born"])])


# The end of the owner.

_live: set[Lab] = set()
"""The labs of this process that have to be removed."""
_hold_lock, _holders, _held = threading.RLock(), 0, set[int]()


def _abandon() -> None:
    with contextlib.ExitStack() as labs:
        for lab in list(_live):
            labs.callback(lab.close)


def _disown() -> None:
    global _holders
    _holders = 0
    _live.clear()


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Remove the labs, then die of the signal."""
    if _holders:
        _held.add(number)
        return
    _abandon()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A signal waits for the end of this block: in its middle nobody knows what there is to remove."""
    global _holders
    with _hold_lock:
        _holders += 1
    try:
        yield
    finally:
        with _hold_lock:
            _holders -= 1
        while _held and not _holders:
            os.kill(os.getpid(), _held.pop())


def _watch_signals(watch: bool) -> None:
    """Take over the signals that would end this process at once, or give them back."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows it there only; the next lab sweeps
    old, new = (signal.SIG_DFL, _on_signal) if watch else (_on_signal, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is old:
            signal.signal(number, new)


atexit.register(_abandon)
os.register_at_fork(after_in_child=_disown)


# Jobs.


class _Output:
    """What a rank writes: a file without a name. It shares its position with the rank, so it is never sought."""

    def __init__(self, echo: TextIO | None) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 -- Job.end closes it
        self.echo, self.seen = echo, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, start: int = 0) -> bytes:
        fd = self.file.fileno()
        return os.pread(fd, max(0, os.fstat(fd).st_size - start), start)

    def show(self) -> None:
        if self.echo and (new := self.read(self.seen)):
            self.seen += len(new)
            self.echo.write(self.decoder.decode(new))
            self.echo.flush()


class Job:
    """One process per host, under way. It ends with `wait`, or with its lab."""

    def __init__(
        self, command: Sequence[str], spaces: Sequence[str], environment: Mapping[str, str], stream: bool
    ) -> None:
        self.results: list[RankResult] | None = None
        self._spaces = spaces
        self._processes: list[subprocess.Popen[bytes]] = []
        echoes = [(sys.stdout, sys.stderr) if stream and not rank else (None, None) for rank in range(len(spaces))]
        self._outputs = [(_Output(out), _Output(err)) for out, err in echoes]
        try:
            for rank, (space, (out, err)) in enumerate(zip(spaces, self._outputs, strict=True)):
                process = subprocess.Popen(
                    [_tool("ip") or "ip", "netns", "exec", space, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out.file,
                    stderr=err.file,
                    env={**environment, "RANK": str(rank)},
                    start_new_session=True,
                )
                self._processes.append(process)
        except BaseException:
            self.end()
            raise

    def wait(self, timeout: float = 600.0, grace: float = 5.0) -> list[RankResult]:
        """The results in rank order. When a rank fails, the others have `grace` seconds to find out by themselves.

        When this returns, or raises, no process of the job is left.
        """
        try:
            failed = self._watch(timeout, grace)
            late = self._with_code(None)
        finally:
            results = self.end()
        if failed:
            raise JobFailed("\n".join(results[rank].describe() for rank in failed), results)
        if late:
            ranks = ", ".join(map(str, late))
            said = "\n".join(results[rank].describe() for rank in late)
            raise JobTimeout(f"not done within {timeout:g} s: rank {ranks}, ended now\n{said}", results)
        return results

    def end(self) -> list[RankResult]:
        """End what is still running, and collect what all have said."""
        if self.results is not None:
            return self.results
        _clear(self._spaces, _PATIENCE)
        for process in self._processes:
            process.kill()  # does nothing, unless it has not even reached its host
            process.wait(_KILL_TIMEOUT)
        self._show()
        texts = [[output.read().decode(errors="replace") for output in both] for both in self._outputs]
        for output in itertools.chain(*self._outputs):
            output.file.close()
        self.results = [
            RankResult(rank, process.returncode, *text)
            for rank, (process, text) in enumerate(zip(self._processes, texts, strict=False))
        ]
        return self.results

    def _watch(self, timeout: float, grace: float) -> list[int]:
        """Wait for the end of all ranks, or for a reason to end them: the ranks that failed first."""
        deadline = time.monotonic() + timeout
        failed: list[int] = []
        while self._with_code(None) and time.monotonic() < deadline:
            if not failed and (failed := self._failed()):
                deadline = min(deadline, time.monotonic() + grace)
            self._show()
            time.sleep(_POLL)
        return failed or self._failed()

    def _with_code(self, code: int | None) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() == code]

    def _failed(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll()]

    def _show(self) -> None:
        for output in self._outputs[0]:
            output.show()


# The lab.


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"a lab needs the network namespaces of Linux, and this is {sys.platform}"
    if os.geteuid():
        return "a lab needs root to make network namespaces: run as root, or with sudo"
    for tool in ("ip", "tc"):
        if not _tool(tool):
            return f"a lab needs the command `{tool}`: install the package iproute2"
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

    A job is one process per host, whose rank is the number of the host. A rate of None is no limit.
    """

    _numbers = itertools.count()

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be in 1..{MAX_HOSTS}, got {hosts}")
        if rate is not None:
            parse_rate(rate)
        if problem := _missing():
            raise LabError(problem)
        self.rate, self.addresses = rate, [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._prefix = f"oktopk-{os.getpid()}-{_birth(os.getpid())}-{next(self._numbers)}-"
        self._bridge = self._prefix + "bridge"
        self._hosts = [f"{self._prefix}host{host}" for host in range(hosts)]
        self._job: Job | None = None

    def __enter__(self) -> Lab:
        if self in _live:
            raise LabError("this lab is built already: make another one")
        _sweep()
        _watch_signals(True)
        with _signals_held():
            _live.add(self)
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
        if self not in _live:
            return
        with _signals_held():
            _remove([name for name, _ in _existing(self._prefix)])
            if self._job:
                self._job.end()
            _live.discard(self)
        if not _live:
            _watch_signals(False)

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
            _call("tc", "-n", space, "qdisc", "replace", "dev", INTERFACE, "root", *discipline)
            _call("tc", "-n", self._bridge, "qdisc", "replace", "dev", f"p{host}", "root", *discipline)
        self.rate = rate

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull the cable of a host, or plug it in again."""
        self._check_open()
        if not 0 <= host < len(self._hosts):
            raise ValueError(f"host must be in 0..{len(self._hosts) - 1}, got {host}")
        _call("ip", "-n", self._bridge, "link", "set", f"p{host}", "up" if up else "down")

    def counters(self) -> list[Counters]:
        """Per host, since the lab was built. A packet is what the kernel handles at once: up to 64 KiB of TCP."""
        self._check_open()
        answers = [_call("ip", "-n", space, "-j", "-s", "link", "show", INTERFACE) for space in self._hosts]
        both = [json.loads(answer)[0]["stats64"] for answer in answers]
        return [Counters(x["tx"]["bytes"], x["tx"]["packets"], x["rx"]["bytes"], x["rx"]["packets"]) for x in both]

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, stream: bool = False) -> Job:
        """Start the command on every host, set up for `torch.distributed.init_process_group("gloo")`.

        `stream` shows what rank 0 writes as it comes, while `Job.wait` waits.
        """
        self._check_open()
        if self._job and self._job.results is None:
            raise LabError("the hosts are busy: a lab runs one job at a time")
        with _signals_held():
            self._job = Job(command, self._hosts, self._environment(env or {}), stream)
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
        _call("ip", "netns", "add", self._bridge)
        # Without IPv6 and snooping the bridge never speaks itself, and the counters show the job alone.
        speaks = "/proc/sys/net/ipv6/conf/default/disable_ipv6"
        _call("ip", "netns", "exec", self._bridge, "sh", "-c", f"[ ! -w {speaks} ] || echo 1 > {speaks}")
        in_bridge = ["-n", self._bridge, "link"]
        _call("ip", *in_bridge, "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _call("ip", *in_bridge, "set", "br0", "up")
        for host, (space, address) in enumerate(zip(self._hosts, self.addresses, strict=True)):
            _call("ip", "netns", "add", space)
            _call("ip", *in_bridge, "add", f"p{host}", "type", "veth", "peer", "name", INTERFACE, "netns", space)
            _call("ip", *in_bridge, "set", f"p{host}", "master", "br0", "up")
            _call("ip", "-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _call("ip", "-n", space, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            _call("ip", "-n", space, "link", "set", "lo", "up")

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return {
            **defaults,
            **inherited,
            **given,
            "WORLD_SIZE": str(len(self._hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def _check_open(self) -> None:
        if self not in _live:
            raise LabError("the lab is not built: use it inside `with Lab(...) as lab:`")


# The command line.


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oktopk.tools.lab",
        description="Run a command on every host of a small cluster that is made of network namespaces on this "
        "machine, and removed afterwards. Needs root. The command finds RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT in its environment, so that torch.distributed works in it. The output of rank 0 is shown; "
        "that of other ranks only when they fail.",
        epilog="example: python -m oktopk.tools.lab --hosts 4 --rate 1gbit -- python job.py",
    )
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts, one rank each (default: 4)")
    parser.add_argument("--rate", help="rate of each link, both ways: 100mbit, 1gbit (default: no limit)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the job (default: 600)")
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds the others have when a rank fails (default: 5)"
    )
    parser.add_argument("command", nargs="+", help="the command, after --")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a rank fails or the lab cannot be built."""
    parser = _arguments()
    options = parser.parse_args(argv)
    try:
        with Lab(options.hosts, options.rate) as lab:
            lab.run(options.command, timeout=options.timeout, grace=options.grace, stream=True)
            for rank, host in enumerate(lab.counters()):
                sent, received = host.sent_bytes / 1e6, host.received_bytes / 1e6
                print(f"host {rank}: {sent:.2f} MB sent, {received:.2f} MB received", file=sys.stderr)
    except ValueError as error:
        parser.error(str(error))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
