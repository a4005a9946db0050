"""A job: its processes on the hosts, their output, and how they ended."""

from __future__ import annotations

import codecs
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from .namespaces import KILL_TIMEOUT, LabError, end_processes, find_tool

_POLL = 0.02
_PATIENCE = 1.0
"""Seconds between SIGTERM and SIGKILL."""
_TAIL = 2000


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. A negative code is the number of a signal."""

    rank: int
    code: int
    stdout: str
    stderr: str

    def describe(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        output = (self.stdout + self.stderr).strip()[-_TAIL:] or "nothing"
        return f"rank {self.rank} ended with {how}; its last output:\n{output}"


class JobFailed(LabError):
    """A rank of a job failed; `results` has the output of every rank."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


class JobTimeout(JobFailed, TimeoutError):
    """A job did not finish in time."""


class _Output:
    """The output of a rank, in an unnamed file. The rank shares the file position, so it must not be moved."""

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
    """A running job: one process per rank, in the namespace of its host. It ends with wait(), or with its lab."""

    def __init__(
        self,
        command: Sequence[str],
        spaces: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        stream: bool,
    ) -> None:
        self.results: list[RankResult] | None = None
        self._spaces = spaces
        self._processes: list[subprocess.Popen[bytes]] = []
        echoes = [(sys.stdout, sys.stderr) if stream and not rank else (None, None) for rank in range(len(spaces))]
        self._outputs = [(_Output(out), _Output(err)) for out, err in echoes]
        try:
            for space, environment, (out, err) in zip(spaces, environments, self._outputs, strict=True):
                process = subprocess.Popen(
                    [find_tool("ip") or "ip", "netns", "exec", space, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out.file,
                    stderr=err.file,
                    env=environment,
                    start_new_session=True,
                )
                self._processes.append(process)
        except BaseException:
            self.end()
            raise

    def wait(self, timeout: float = 600.0, grace: float = 5.0) -> list[RankResult]:
        """Return the results in rank order. When a rank fails, the others have `grace` seconds to finish.

        No process of the job is left when this returns or raises.
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
            outputs = "\n".join(results[rank].describe() for rank in late)
            raise JobTimeout(f"not finished within {timeout:g} s: rank {ranks}, killed\n{outputs}", results)
        return results

    def end(self) -> list[RankResult]:
        """End the processes that still run, and collect the output of all."""
        if self.results is not None:
            return self.results
        end_processes(self._spaces, _PATIENCE)
        for process in self._processes:
            process.kill()  # for a process that has not entered its namespace yet
            process.wait(KILL_TIMEOUT)
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
        """Wait for all ranks, or for a reason to end them; returns the ranks that failed first."""
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
