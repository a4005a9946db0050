"""Train a network with sparse allreduce: alone, under torchrun, mpirun or srun, or with --ranks.

    oktopk train --config lstman4_small --ranks 2                small enough to try: two ranks of this machine
    oktopk train --config lstm_extended --data-dir audio_data    the configuration can be a TOML file, too
    mpirun -np 2 oktopk train --dnn lstman4 --nworkers 2         one rank per process
    oktopk train --resume runs/NAME                              go on where that run was saved

Command line > environment (OKTOPK_LR for --lr) > config > what the network has of its own > default. Names may
be written with dashes or underscores. Without --data-dir, data is generated. Ctrl-C saves and ends the run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from oktopk.errors import OkTopkError
from oktopk.train.config.options import OPTIONS, ConfigError
from oktopk.train.config.origins import Resolved, resolve
from oktopk.train.folder import CONFIG
from oktopk.train.launch import STARTED_BY_RANKS, Place, check_world, find_place, run_ranks
from oktopk.train.run import BAD_INPUT, train
from oktopk.train.screen import BarHandler
from oktopk.train.together import is_raised_by_all, raised_by_all

from ..complaint import complain
from ..options import add_config, add_option, given

AUTO = "auto"
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="RUN",
        help="go on with the run in this folder; alone: with the one in --out, if there is one",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures at the end as JSON, the log on stderr"
    )
    parser.add_argument("--quiet", action="store_true", help="warnings only")
    parser.add_argument("--verbose", action="store_true", help="what is of use when something goes wrong")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, item in OPTIONS.items():
        topic = item.metadata["topic"]
        group = groups.get(topic) or groups.setdefault(topic, parser.add_argument_group(topic))
        add_option(group, name)


def run(options: argparse.Namespace) -> int:
    place = find_place(os.environ)
    _listen(place, options)
    try:
        return _run(options)
    except (*BAD_INPUT, OkTopkError) as error:
        log.debug("in full:", exc_info=True)
        if place.rank == 0 or not is_raised_by_all(error):
            complain("train", error, f"rank {place.rank}: " if place.rank else "")
        return 2 if isinstance(error, ConfigError) else 1


def _run(options: argparse.Namespace) -> int:
    try:
        resolved, resume = _resolve(options)
        place = find_place(os.environ, resolved.config.nwpernode)
        ranks = _check_ranks(resolved, place, hasattr(options, "ranks"))
    except ConfigError as error:
        raised_by_all(error)  # they were all started alike
        raise
    if ranks is not None:
        return run_ranks(ranks, [sys.executable, "-m", "oktopk", *options.words])
    outcome = train(resolved, place, resume)
    if options.json and place.rank == 0:
        print(json.dumps({"folder": str(outcome.folder), **outcome.result}, indent=2))
    return outcome.code


def _check_ranks(resolved: Resolved, place: Place, asked: bool) -> int | None:
    """How many ranks to start; None if this process is one."""
    ranks = resolved.config.ranks
    if ranks is not None and place.how == "alone":
        check_world(Place(f"--ranks {ranks}", 0, ranks), resolved.config.nworkers)
        return ranks
    if asked and place.how != STARTED_BY_RANKS:
        raise ConfigError(f"--ranks starts ranks by itself, but this is one of {place.world} ranks ({place.how})")
    check_world(place, resolved.config.nworkers)
    return None


def _resolve(options: argparse.Namespace) -> tuple[Resolved, bool]:
    """The options of the run, and whether to go on with an earlier one."""
    chosen = given(options)
    config, folder = options.config, options.resume
    if folder == AUTO:
        folder = chosen.get("out")
        if folder is None:
            raise ConfigError("--resume needs a folder: --resume RUN, or --out RUN --resume")
        found = (Path(folder) / CONFIG).exists()
    elif folder is not None:
        chosen["out"], found = folder, True
        if not (Path(folder) / CONFIG).exists():
            raise ConfigError(f"--resume {folder}: there is no run in it (no {CONFIG})")
    else:
        found = False
    if found and config is None:
        config = str(Path(folder) / CONFIG)
    return resolve(chosen, os.environ, config), found


def _listen(place: Place, options: argparse.Namespace) -> None:
    """Log lines of rank 0 are shown; of the others, warnings."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if options.json else BarHandler()
    prefix = "" if place.rank == 0 else f"rank {place.rank}: "
    handler.setFormatter(_Plain(prefix))
    logger = logging.getLogger("oktopk")
    logger.handlers = [handler]
    shown = logging.WARNING if options.quiet or place.rank else logging.INFO
    logger.setLevel(logging.DEBUG if options.verbose else shown)
    logger.propagate = False


class _Plain(logging.Formatter):
    """The message, and how bad it is if it is bad."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._prefix}{level}{super().format(record)}"
