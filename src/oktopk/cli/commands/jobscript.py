"""Write a SLURM or PBS job script for one algorithm, or one script for each.

    oktopk jobscript --scheduler slurm --nodes 4 --ranks-per-node 2 --data-dir audio_data --lr 0.01 > job.sh
    oktopk jobscript --scheduler pbs --compressor all --config lstm_extended --out jobs

Takes the options of `oktopk train` that are listed below; the script sets the number of ranks and the run folder
itself. Options that you pass, and the most common ones, appear as lr="${lr:-0.01}", so that `lr=0.1 sbatch job.sh`
overrides them. Paths of data are written in full. The script activates the virtual environment that this
command runs in, if any, and loads the modules of --module.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import OkTopkError
from oktopk.tools.jobscript import SCHEDULERS, Job, JobError, render
from oktopk.train.config.options import DEFAULT, OPTIONS
from oktopk.train.config.origins import ResolvedConfig, resolve
from oktopk.utils.files import atomic_path

from ..errors import print_error
from ..options import add_config, add_option, collect_options
from ..parser import find_imports
from ..parsing import parse_whole

ALL = "all"
ALWAYS = ("dnn", "data_dir", "lr", "batch_size", "max_epochs", "compressor", "density", "seed")
"""Options that the script always sets."""
_NO_VENV = "none"
_SET_BY_SCRIPT = ("out", "nworkers", "nwpernode", "ranks", "compression")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scheduler", required=True, choices=SCHEDULERS, help="job scheduler")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"output file, or folder (required for --compressor {ALL}); default: stdout",
    )
    parser.add_argument("--nodes", type=parse_whole, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument(
        "--ranks-per-node", type=parse_whole, default=1, metavar="M", help="ranks on each node (default: 1)"
    )
    parser.add_argument(
        "--cpus-per-rank",
        type=parse_whole,
        default=1,
        metavar="C",
        help="cores of each rank, also OMP_NUM_THREADS (default: 1)",
    )
    parser.add_argument("--time", default="01:00:00", metavar="HH:MM:SS", help="time limit (default: 01:00:00)")
    parser.add_argument(
        "--partition", "--queue", dest="queue", metavar="NAME", help="partition (SLURM) or queue (PBS)"
    )
    parser.add_argument("--account", metavar="NAME", help="account to charge")
    parser.add_argument(
        "--module",
        dest="modules",
        action="append",
        default=[],
        metavar="NAME",
        help="load this environment module, like openmpi/4.1; repeat it for more",
    )
    parser.add_argument(
        "--venv",
        metavar="FOLDER",
        help=f"activate this virtual environment; {_NO_VENV}: none (default: the one that this command runs in)",
    )
    add_config(parser)
    group = parser.add_argument_group("options of oktopk train")
    for name in OPTIONS:
        if name not in _SET_BY_SCRIPT:
            add_option(group, name, f"; {ALL}: one script for each" if name == "compressor" else "")


def run(options: argparse.Namespace) -> int:
    try:
        scripts = _scripts(options)
        if options.out is None:
            print(scripts.popitem()[1], end="")
            return 0
        for path, text in _places(scripts, options).items():
            _write(path, text)
            print(path)
        return 0
    except (OkTopkError, OSError) as error:
        print_error("jobscript", error)
        return 2 if isinstance(error, OkTopkError) else 1


def _scripts(options: argparse.Namespace) -> dict[str, str]:
    """Render the scripts, by algorithm."""
    chosen = collect_options(options)
    chosen.pop("out", None)  # the script's own --out
    every = str(chosen.get("compressor")).lower() == ALL
    if every and options.out is None:
        raise JobError(f"--compressor {ALL} makes {len(ALGORITHMS)} scripts: pass --out FOLDER")
    if every:
        del chosen["compressor"]
    first = resolve(chosen, {}, options.config)  # the job reads its own environment, not this one
    names = tuple(ALGORITHMS) if every else (first.config.algorithm,)
    return {
        name: render(_job(options, resolve(chosen | {"compressor": name}, {}, options.config))) for name in names
    }


def _job(options: argparse.Namespace, resolved: ResolvedConfig) -> Job:
    return Job(
        scheduler=options.scheduler,
        options=_values(resolved),
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        cpus_per_rank=options.cpus_per_rank,
        time=options.time,
        queue=options.queue,
        account=options.account,
        modules=tuple(options.modules),
        venv=_venv(options.venv),
        imports=tuple(find_imports(options.words)),
    )


def _venv(given: str | None) -> str | None:
    """The virtual environment to activate; None for none."""
    if given is None:
        return sys.prefix if sys.prefix != sys.base_prefix else None
    if given == _NO_VENV:
        return None
    folder = Path(given).absolute()
    if not (folder / "bin" / "activate").exists():
        raise JobError(f"--venv {given}: no virtual environment (it has no bin/activate)")
    return str(folder)


def _values(resolved: ResolvedConfig) -> dict[str, str | None]:
    """Choose the options that the script sets, those of --config included, so that it needs no other file."""
    values: dict[str, str | None] = {}
    for name, origin in resolved.origins.items():
        chosen = origin != DEFAULT and not origin.startswith("network ")
        if name not in _SET_BY_SCRIPT and (chosen or name in ALWAYS):
            value = getattr(resolved.config, name)
            values[name] = None if value is None else str(value.absolute() if isinstance(value, Path) else value)
    if resolved.config.algorithm == "dense":
        values["density"] = None  # has no effect, and train would warn about it
    return values


def _places(scripts: dict[str, str], options: argparse.Namespace) -> dict[Path, str]:
    if len(scripts) == 1 and not options.out.is_dir():
        return {options.out: next(iter(scripts.values()))}
    if options.out.exists() and not options.out.is_dir():
        raise JobError(f"{options.out} is a file, but {len(scripts)} scripts need a folder")
    return {options.out / f"{name}.{options.scheduler}.sh": text for name, text in scripts.items()}


def _write(path: Path, text: str) -> None:
    """Write the script unless another one is there: the user may have edited it."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise JobError(f"{path} exists and differs: remove it, or pass another --out")
    with atomic_path(path) as draft:
        draft.write_text(text, encoding="utf-8")
        os.chmod(draft, 0o755)
