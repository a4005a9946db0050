"""A job of torchrun that loses a host and gains one: its number of ranks goes 4, 3, 4.

python -m stress.elastic.run          # make elastic

The agent of rank 0 is killed with its worker, and another agent comes later. What the run has become is compared
with one that nobody has disturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from oktopk.comm import Communicator, run_threads
from oktopk.tools.tables import format_table
from oktopk.train.config.origins import resolve
from oktopk.train.launch import RankInfo
from oktopk.train.run import train_rank
from oktopk.train.stop import Stop
from stress.elastic import job as elastic_job
from stress.elastic.job import COURSES, Course
from stress.elastic.laws import Run, comparisons, laws
from tests.support import worlds

SECONDS = 120.0
"""For each thing that is waited for; on an idle machine the whole takes half of it."""
AT_REST = "join_timeout=100,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=8,is_host=0"


@dataclass
class Job:
    """Agents of torchrun, each on a host of its own as far as it knows, that find each other through a store."""

    folder: Path
    name: str
    port: int
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def course(self) -> Course:
        return COURSES[self.name]

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def start_agent(self) -> None:
        most = self.course.ranks
        options = [
            *(f"--nnodes={most - 1}:{most}", "--nproc-per-node=1", "--max-restarts=5", "--monitor-interval=0.2"),
            *("--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{self.port}"),
            *(f"--rdzv-conf={AT_REST}", "--local-addr=127.0.0.1"),
        ]
        program = [elastic_job.__file__, str(self.folder), self.name]
        with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *program],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )  # fmt: skip
        self.agents.append(agent)

    def worker(self, agent: subprocess.Popen[bytes]) -> int | None:
        """The process of its present worker, which is a session of its own."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.notes / f"worker-of-{agent.pid}").read_text())
        return None

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        worker = self.worker(agent)
        for process in (agent.pid, worker):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
        agent.wait(SECONDS)

    def rank_0(self) -> subprocess.Popen[bytes]:
        """Which agent has it: the one that writes metrics and manifests is the hardest to lose."""
        for agent in self.agents:
            note = self.notes / f"steps-{self.worker(agent)}"
            if note.read_text().split()[1] == "0":
                return agent
        raise AssertionError(self.said())

    def wait_until_all_are_at(self, step: int, world: int) -> None:
        marks = [self.notes / f"at-{step}-{rank}" for rank in range(world)]
        assert worlds.wait_until(lambda: all(mark.exists() for mark in marks), SECONDS), self.said()

    def wait_until_all_have_ended(self) -> None:
        codes = [agent.wait(SECONDS) for agent in self.agents]
        assert sorted(codes) == [-signal.SIGKILL, *[0] * self.course.ranks], self.said()
        workers = [int(note.read_text()) for note in self.notes.glob("worker-of-*")]
        assert worlds.wait_until(lambda: not any(map(worlds.is_running, workers)), 60)

    def said(self) -> str:
        logs = sorted(self.folder.glob("agent-*.log"))
        return "\n".join(f"{log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)

    @contextmanager
    def reaped(self) -> Iterator[None]:
        try:
            yield
        finally:
            for agent in self.agents:
                if agent.poll() is None:
                    self.kill(agent)


def disturbed(folder: Path, name: str) -> Run:
    """Rank 0 is lost with its host, and a new host comes."""
    (folder / "notes").mkdir(parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(folder, name, store.port)
    with job.reaped():
        for _ in range(job.course.ranks):
            job.start_agent()
        job.wait_until_all_are_at(job.course.kill_at, job.course.ranks)
        job.kill(job.rank_0())
        (job.notes / "killed").touch()
        job.wait_until_all_are_at(job.course.join_at, job.course.ranks - 1)
        job.start_agent()
        job.wait_until_all_have_ended()
    return Run(job.course, folder / "run", job.notes)


def undisturbed(folder: Path, course: Course) -> Path:
    """As many ranks all the time, as threads."""
    resolved = resolve({**course.options, "out": folder}, {})

    def job(comm: Communicator) -> None:
        assert train_rank(resolved, RankInfo("test", comm.rank, comm.world), comm, Stop()).code == 0

    run_threads(course.ranks, job)
    return folder


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="oktopk-elastic-") as name:
        folder = Path(name)
        run = disturbed(folder / "elastic", "full")
        found = laws(run) + comparisons(run, undisturbed(folder / "undisturbed", run.course))
    rows = [["holds" if law.holds else "BROKEN", law.promise, law.figure] for law in found]
    print(format_table(["", "promise", "figure"], rows))
    return int(not all(law.holds for law in found))


if __name__ == "__main__":
    sys.exit(main())
