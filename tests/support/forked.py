"""Python programs that are forked from the server of `worlds`, where torch and oktopk are in memory already.

What matters to a test of its ranks' work is what they do, and not how the interpreter starts, which takes
seconds for each. Commands that a user types are tested as they are typed, too, by tests that say so.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO

import pytest

from oktopk.utils import processes
from oktopk.utils.processes import local_world
from tests.support import worlds

Output = IO[bytes] | int | None


class ForkedProgram:
    """`python PROGRAM WORD…`, `python -m MODULE WORD…` or `python -c CODE WORD…`, with the face of a Popen.

    In a session of its own. Its output goes to files, or is that of this process; a pipe is a file, too, that
    communicate() reads at the end.
    """

    def __init__(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL,
        stdout: Output = None, stderr: Output = None, start_new_session: bool = True, cwd: Path | None = None,
    ) -> None:  # fmt: skip
        python, *words = map(str, command)
        if python != sys.executable or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
            raise ValueError(f"cannot be forked: {command}")
        if (stdin, start_new_session) != (subprocess.DEVNULL, True):
            raise ValueError("a forked program has no input, and a session of its own")
        piped = subprocess.PIPE in (stdout, stderr)
        self._pipe = tempfile.TemporaryFile() if piped else None  # noqa: SIM115  closed at the end of the block
        outputs = [
            _path(self._pipe if output == subprocess.PIPE else output, own)
            for output, own in ((stdout, 1), (stderr, 2))
        ]
        environment = dict(os.environ if env is None else env)
        self._process = worlds.forked(_become, words, environment, str(cwd or os.getcwd()), outputs)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        self.wait(timeout)
        if self._pipe is None:
            return b"", None
        self._pipe.seek(0)
        return self._pipe.read(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid is not None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.wait()
        if self._pipe is not None:
            self._pipe.close()


_FACE = SimpleNamespace(Popen=ForkedProgram, DEVNULL=subprocess.DEVNULL)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that oktopk starts on this machine, in this test's own process, are forked."""
    monkeypatch.setattr(processes, "subprocess", _FACE)


def run_command(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run(command) in that folder; the ranks that it starts are forked, too."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with ForkedProgram(command, environment, stdout=out, stderr=err, cwd=folder) as process:
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


def run_program(program: Path, words: Sequence[str], ranks: int | None, timeout: float) -> str:
    """What it prints, alone or on several ranks, with the environment that torchrun would have given them."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, local_world(ranks or 1) as world:
        environments = [{**own, "TORCHELASTIC_RUN_ID": "test"} for own in world] if ranks else [{}]
        running = [
            ForkedProgram([sys.executable, program, *words], {**os.environ, **own}, stdout=out, stderr=err)
            for own in environments
        ]
        try:
            codes = [process.wait(timeout) for process in running]
        finally:
            for process in running:
                process.kill()
        said, complaints = (_text(file) for file in (out, err))
    assert not any(codes), f"{codes}\n{said}\n{complaints}"
    return said


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _path(output: Output, own: int) -> str:
    """Where another process can open it."""
    if output == subprocess.DEVNULL:
        return os.devnull
    if isinstance(output, int):
        raise ValueError("the output of a forked program is a file, or that of this process")
    return f"/proc/{os.getpid()}/fd/{own if output is None else output.fileno()}"


# In the program's own process.


def _become(words: list[str], environment: dict[str, str], folder: str, outputs: list[str]) -> None:
    """Go on as the program, up to its end."""
    os.setsid()
    worlds.make_thread_pool()
    processes.subprocess = _FACE  # type: ignore[attr-defined]  # the ranks that it starts are forked, …
    worlds.start_forkserver = lambda: None  # … by the same server
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    os.chdir(folder)
    for place, path in enumerate(outputs, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    how, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("", words)
    sys.orig_argv = [sys.executable, *words]
    sys.argv = list(rest) if how != "-c" else ["-c", *rest[1:]]
    first = folder if how else str(Path(rest[0]).resolve().parent)
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if how == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(rest[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out
