"""Render job scripts for SLURM and PBS. Values have the form lr="${lr:-0.01}", so that the environment overrides
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from oktopk.errors import OkTopkError

SCHEDULERS = ("slurm", "pbs")
_TIME = re.compile(r"\d{1,4}:[0-5]\d:[0-5]\d")
_WORD = re.compile(r"[\w.+@/:,-]+", re.ASCII)
_NAME_LENGTH = 15  # the limit of older PBS versions
_RANDOM = "od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'"
_SPECIAL = re.compile(r'([\\"$`}])')


class JobError(OkTopkError, ValueError):
    """A job that no scheduler would accept."""


@dataclass(frozen=True)
class Job:
    """One run of `oktopk train`. `options` are its option values; an option of None is only passed if the job's
    environment sets it."""

    scheduler: str
    options: Mapping[str, str | None]
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    time: str = "01:00:00"
    queue: str | None = None
    account: str | None = None
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    venv: str | None = None
    """The virtual environment that has oktopk."""
    imports: tuple[str, ...] = ()
    """Python modules with plug-ins."""

    def __post_init__(self) -> None:
        if self.scheduler not in SCHEDULERS:
            raise JobError(f"--scheduler must be one of {', '.join(SCHEDULERS)}, got {self.scheduler!r}")
        if not _TIME.fullmatch(self.time):
            raise JobError(f"--time must be HH:MM:SS, got {self.time!r}")
        for what in ("nodes", "ranks_per_node", "cpus_per_rank"):
            if getattr(self, what) < 1:
                raise JobError(f"--{what.replace('_', '-')} must be at least 1, got {getattr(self, what)}")
        words = {"queue": self.queue, "account": self.account}
        for what, value in (*words.items(), *(("module", name) for name in self.modules)):
            if value is not None and not _WORD.fullmatch(value):
                raise JobError(f"--{what} must be a single word, got {value!r}")

    @property
    def name(self) -> str:
        return f"{self.options['compressor']}-{self.options['dnn']}"[:_NAME_LENGTH]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def render(job: Job) -> str:
    """Render the script."""
    head, submit, launch = _slurm(job) if job.scheduler == "slurm" else _pbs(job)
    values = [f'{name}="${{{name}:-{quote(value or "")}}}"' for name, value in job.options.items()]
    words = [_option(name, value) for name, value in job.options.items()]
    words += ['--nworkers "$nworkers"', '--out "$out" --resume']
    lines = [
        "#!/bin/bash",
        *head,
        "set -euo pipefail",
        *_environment(job),
        "",
        f"# The environment overrides each of these: lr=0.1 {submit}",
        *values,
        *_job_values(job),
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{job.cpus_per_rank}}}"',
        *_secret(job),
        "",
        "# A job that is queued again with the same $out resumes from the last checkpoint.",
        f"{launch} oktopk train \\",
        *(f"    {word} \\" for word in words[:-1]),
        f"    {words[-1]}",
    ]
    return "\n".join(lines) + "\n"


def quote(value: str) -> str:
    r"""Quote a value for `word` in "${name:-word}". There a backslash escapes everything but the apostrophe, which
    needs quotes of its own.

    >>> print(quote("it's ${x}"))
    it"'"s \${x\}
    """
    return _SPECIAL.sub(r"\\\1", value).replace("'", '"\'"')


def _environment(job: Job) -> list[str]:
    """Lines that let the job find what the submitting shell finds. An empty $venv activates none."""
    lines = []
    if job.modules:  # many versions of `module` use unset variables
        lines += ["set +u", f"module load {' '.join(job.modules)}", "set -u"]
    if job.venv is not None:
        lines += [f'venv="${{venv-{quote(job.venv)}}}"', '[ -z "$venv" ] || . "$venv/bin/activate"']
    if job.imports:
        lines.append(f'export OKTOPK_IMPORT="${{OKTOPK_IMPORT:-{quote(",".join(job.imports))}}}"')
    return ["", *lines] if lines else []


def _option(name: str, value: str | None) -> str:
    flag = f"--{name.replace('_', '-')}"
    # The inner quotes keep a value with spaces together; an empty value passes no option.
    return f'{flag} "${name}"' if value is not None else f'${{{name}:+{flag} "${name}"}}'


def _job_values(job: Job) -> list[str]:
    """Values that depend on the submitted job, which may have more nodes than the script asks for."""
    if job.scheduler == "slurm":
        ranks, identity = f"${{SLURM_NTASKS:-{job.ranks}}}", "${SLURM_JOB_ID:-$$}"
    else:
        ranks, identity = str(job.ranks), "${PBS_JOBID:-$$}"
    return [f'nworkers="${{nworkers:-{ranks}}}"', f'out="${{out:-runs/$dnn-$compressor-seed$seed-{identity}}}"']


def _secret(job: Job) -> list[str]:
    """Ranks of srun prove by a secret that they belong to the job. Those of mpiexec connect through MPI."""
    if job.scheduler != "slurm":
        return []
    return [
        "# New in every job; only its ranks have it (docs/security.md).",
        f'[ -n "${{OKTOPK_SECRET_FILE:-}}" ] || export OKTOPK_SECRET="${{OKTOPK_SECRET:-$({_RANDOM})}}"',
    ]


def _slurm(job: Job) -> tuple[list[str], str, str]:
    head = [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={job.ranks_per_node}",
        f"#SBATCH --cpus-per-task={job.cpus_per_rank}",
        f"#SBATCH --time={job.time}",
        "#SBATCH --signal=TERM@120",  # 120 s before the end, so that the run can save
        "#SBATCH --output=%x-%j.out",
    ]
    head += [f"#SBATCH --partition={job.queue}"] * (job.queue is not None)
    head += [f"#SBATCH --account={job.account}"] * (job.account is not None)
    return head, "sbatch SCRIPT", f'srun --ntasks "$nworkers" --cpus-per-task {job.cpus_per_rank}'


def _pbs(job: Job) -> tuple[list[str], str, str]:
    m, c = job.ranks_per_node, job.cpus_per_rank
    head = [
        f"#PBS -N {job.name}",
        f"#PBS -l select={job.nodes}:ncpus={m * c}:mpiprocs={m}:ompthreads={c}",
        f"#PBS -l walltime={job.time}",
        "#PBS -j oe",
        "#PBS -V",  # pass the environment of qsub to the job, as SLURM does
    ]
    head += [f"#PBS -q {job.queue}"] * (job.queue is not None)
    head += [f"#PBS -A {job.account}"] * (job.account is not None)
    # PBS starts jobs in the home folder
    return head, "qsub SCRIPT", 'cd "${PBS_O_WORKDIR:-.}"\nmpiexec -n "$nworkers"'
