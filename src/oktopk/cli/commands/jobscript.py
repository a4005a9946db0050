"""Write a job script for SLURM or PBS, for one algorithm or for all of them.

    oktopk jobscript --scheduler slurm --nodes 4 --ranks-per-node 2 --data-dir audio_data --lr 0.01 > job.sh
    oktopk jobscript --scheduler pbs --compressor all --config lstm_extended --out jobs

All options of `oktopk train` can be given. In the script each value has the form lr="${lr:-0.01}", so that
`lr=0.1 sbatch job.sh` overrides it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import OkTopkError
from oktopk.tools.jobscript import SCHEDULERS, Job, JobError, render
from oktopk.train.config.options import OPTIONS
from oktopk.train.config.origins import DEFAULT, Resolved, resolve

from ..complaint import complain
from ..options import add_config, add_option, given

ALL = "all"
ALWAYS = ("dnn", "data_dir", "lr", "batch_size", "max_epochs", "compressor", "density", "seed")
"""Stand in the script even if nobody has asked for them."""
_OF_THE_SCRIPT = ("out", "nworkers", "nwpernode", "ranks", "compression")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scheduler", required=True, choices=SCHEDULERS)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"a file, or a folder (needed for {ALL})")
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="M")
    parser.add_argument("--cpus-per-rank", type=int, default=1, metavar="C", help="also OMP_NUM_THREADS")
    parser.add_argument("--time", default="01:00:00", metavar="HH:MM:SS", help="limit (default: one hour)")
    parser.add_argument("--partition", "--queue", dest="queue", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    add_config(parser)
    group = parser.add_argument_group("options of oktopk train")
    for name in OPTIONS:
        if name not in _OF_THE_SCRIPT:
            add_option(group, name, f"; {ALL}: a script for each" if name == "compressor" else "")


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
        complain("jobscript", error)
        return 2 if isinstance(error, OkTopkError) else 1


def _scripts(options: argparse.Namespace) -> dict[str, str]:
    """From the algorithm's name to its script."""
    chosen = given(options)
    chosen.pop("out", None)  # that of the script
    every = str(chosen.get("compressor")).lower() == ALL
    if every and options.out is None:
        raise JobError(f"--compressor {ALL} makes {len(ALGORITHMS)} scripts: say where by --out FOLDER")
    if every:
        del chosen["compressor"]
    first = resolve(chosen, {}, options.config)  # the environment of the job counts, not this one
    names = tuple(ALGORITHMS) if every else (first.config.algorithm,)
    return {
        name: render(_job(options, resolve(chosen | {"compressor": name}, {}, options.config))) for name in names
    }


def _job(options: argparse.Namespace, resolved: Resolved) -> Job:
    return Job(
        scheduler=options.scheduler,
        options=_values(resolved),
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        cpus_per_rank=options.cpus_per_rank,
        time=options.time,
        queue=options.queue,
        account=options.account,
    )


def _values(resolved: Resolved) -> dict[str, str | None]:
    """What the script passes on: a config's values, too, so that the script needs no other file."""
    values: dict[str, str | None] = {}
    for name, origin in resolved.origins.items():
        chosen = origin != DEFAULT and not origin.startswith("network ")
        if name not in _OF_THE_SCRIPT and (chosen or name in ALWAYS):
            value = getattr(resolved.config, name)
            values[name] = None if value is None else str(value)
    if resolved.config.algorithm == "dense":
        values["density"] = None  # of no effect, which train would warn of
    return values


def _places(scripts: dict[str, str], options: argparse.Namespace) -> dict[Path, str]:
    if len(scripts) == 1 and not options.out.is_dir():
        return {options.out: next(iter(scripts.values()))}
    if options.out.exists() and not options.out.is_dir():
        raise JobError(f"{options.out} is a file, but {len(scripts)} scripts need a folder")
    return {options.out / f"{name}.{options.scheduler}.sh": text for name, text in scripts.items()}


def _write(path: Path, text: str) -> None:
    """Nobody's own changes are lost: a file that is there already stays."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise JobError(f"{path} is there already and differs: remove it, or give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    os.chmod(path, 0o755)
