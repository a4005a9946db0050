"""Train a model with sparse all-reduce: as one process, with --ranks N, or under torchrun, mpirun or srun.

    oktopk train --config lstman4_small --ranks 2                a small first run: two ranks on this machine
    oktopk train --config lstm_extended --data-dir audio_data    lstman4 on AN4, ten epochs
    oktopk train --config my.toml                                options from a file
    mpirun -np 2 oktopk train --dnn lstman4 --nworkers 2         one rank per process
    oktopk train --resume runs/NAME                              continue from the last checkpoint

The command line overrides the environment (OKTOPK_LR for --lr), which overrides --config, which overrides the
network's defaults. Option names take dashes or underscores. Without --data-dir, the data is generated. Ctrl-C
saves and stops.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from oktopk.errors import OkTopkError
from oktopk.train.collective_errors import is_collective, mark_collective
from oktopk.train.config.options import OPTIONS, ConfigError
from oktopk.train.config.origins import ResolvedConfig, find_differences, resolve
from oktopk.train.console import ProgressBarHandler
from oktopk.train.launch import STARTED_BY_RANKS, RankInfo, check_world, detect_rank, run_ranks
from oktopk.train.run import BAD_INPUT, train
from oktopk.train.run_folder import CONFIG
from oktopk.utils.schemas import add_schema

from ..errors import print_error
from ..options import add_config, add_option, collect_options

AUTO = "auto"
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="RUN",
        help="resume the run in this folder; without a folder: the run in --out, if there is one",
    )
    parser.add_argument(
        "--override",
        action="store_true",
        help="resume with other options than the run has; length, output and ranks may always differ",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the final results as JSON; the log goes to stderr"
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    parser.add_argument("--verbose", action="store_true", help="log debug messages too")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, item in OPTIONS.items():
        topic = item.metadata["topic"]
        group = groups.get(topic) or groups.setdefault(topic, parser.add_argument_group(topic))
        add_option(group, name)


def run(options: argparse.Namespace) -> int:
    info = detect_rank(os.environ)
    _configure_logging(info, options)
    try:
        return _run(options)
    except (*BAD_INPUT, OkTopkError) as error:
        log.debug("traceback:", exc_info=True)
        if info.rank == 0 or not is_collective(error):
            print_error("train", error, f"rank {info.rank}: " if info.rank else "")
        return 2 if isinstance(error, ConfigError) else 1


def _run(options: argparse.Namespace) -> int:
    try:
        resolved, resume = _resolve(options)
        info = detect_rank(os.environ, resolved.config.nwpernode)
        ranks = _check_ranks(resolved, info, hasattr(options, "ranks"))
    except ConfigError as error:
        mark_collective(error)  # all ranks have the same options
        raise
    if ranks is not None:
        return run_ranks(ranks, [sys.executable, "-m", "oktopk", *options.words])
    outcome = train(resolved, info, resume)
    if options.json and info.rank == 0:
        print(json.dumps(add_schema("train", {"folder": str(outcome.folder), **outcome.result}), indent=2))
    return outcome.code


def _check_ranks(resolved: ResolvedConfig, info: RankInfo, given: bool) -> int | None:
    """Return how many ranks to start, or None if this process is itself a rank."""
    ranks = resolved.config.ranks
    if ranks is not None and info.launcher == "alone":
        check_world(RankInfo(f"--ranks {ranks}", 0, ranks), resolved.config.nworkers)
        return ranks
    if given and info.launcher != STARTED_BY_RANKS:
        raise ConfigError(
            f"--ranks starts its own ranks, but this is already one of {info.world} ranks ({info.launcher})"
        )
    check_world(info, resolved.config.nworkers)
    return None


def _resolve(options: argparse.Namespace) -> tuple[ResolvedConfig, bool]:
    """Resolve the options of the run, and whether to resume an earlier one."""
    chosen = collect_options(options)
    config, folder = options.config, options.resume
    if folder == AUTO:
        folder = chosen.get("out")
        if folder is None:
            raise ConfigError("--resume needs a folder: pass --resume RUN, or --out RUN --resume")
        found = (Path(folder) / CONFIG).exists()
    elif folder is not None:
        chosen["out"], found = folder, True
        if not (Path(folder) / CONFIG).exists():
            raise ConfigError(f"--resume {folder}: no run found (no {CONFIG})")
    else:
        found = False
    if not found:
        if options.override and options.resume is None:
            raise ConfigError("--override needs --resume")
        return resolve(chosen, os.environ, config), False
    saved = str(Path(folder) / CONFIG)
    resolved = resolve(chosen, os.environ, config or saved)
    _check_same(Path(folder), find_differences(resolve({}, {}, saved).config, resolved), options.override)
    return resolved, True


def _check_same(folder: Path, differences: list[str], override: bool) -> None:
    """Refuse to resume a run with other options, or say so if that is wanted."""
    listed = "; ".join(differences)
    if differences and not override:
        raise ConfigError(
            f"--resume {folder}: other options than the run has: {listed}. Remove them, or continue with them: "
            "--override"
        )
    if differences:
        log.info("%s continues with other options: %s", folder, listed)


def _configure_logging(info: RankInfo, options: argparse.Namespace) -> None:
    """Show the log of rank 0, and only the warnings of the others."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if options.json else ProgressBarHandler()
    prefix = "" if info.rank == 0 else f"rank {info.rank}: "
    handler.setFormatter(_Formatter(prefix))
    logger = logging.getLogger("oktopk")
    logger.handlers = [handler]
    shown = logging.WARNING if options.quiet or info.rank else logging.INFO
    logger.setLevel(logging.DEBUG if options.verbose else shown)
    logger.propagate = False


class _Formatter(logging.Formatter):
    """Formats a record as its message, with the level in front of warnings and errors."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._prefix}{level}{super().format(record)}"
