"""Look at this machine, or at all ranks of a world: can it train, how fast are its links, does compression pay?

    oktopk doctor                                                        this machine
    oktopk doctor --ranks 2 --params 25M --density 0.01                  two ranks of it: does compression pay?
    torchrun --nproc-per-node 4 -m oktopk doctor --dnn lstman4 --data-dir audio_data --nworkers 4
    mpirun -np 2 oktopk doctor

Prints a line for each check: ok, warning or problem, what was found, and what to do. Ends with 0 if there is no
problem, otherwise with 1, on every rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from oktopk.errors import OkTopkError
from oktopk.tools.doctor import (
    CHECKS,
    PROBLEM,
    WARNING,
    Asked,
    Data,
    Finding,
    World,
    examine,
    examine_alone,
    exit_code,
    judged,
    rendered,
)
from oktopk.train.config.options import ConfigError, TrainConfig
from oktopk.train.config.origins import DEFAULT, Resolved, resolve
from oktopk.train.launch import STARTED_BY_RANKS, Place, find_place, joined, run_ranks
from oktopk.train.tasks import WORKLOADS, Share, Source
from oktopk.utils.signals import interrupted_code, raising

from ..complaint import complain, sentence
from ..numbers import count
from ..options import add_config, add_option, given

TIMEOUT = 60.0
SHOWN = 5
"""So many faults of the data are named."""
LAST_WORDS = 1.0
"""Seconds for rank 0 to print, when ranks cannot talk: launchers end all of them once one has failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--params", type=count, metavar="N", help="size of the model, like 25M; --dnn has its own")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help="seconds to wait for another rank before giving up (default: 60)",
    )
    group = parser.add_argument_group("options of oktopk train")
    for name in ("dnn", "dataset", "data_dir", "density", "nworkers", "ranks", "out"):
        add_option(group, name)


def run(options: argparse.Namespace) -> int:
    logging.getLogger("oktopk").addHandler(logging.NullHandler())  # what is warned of becomes a finding
    try:
        resolved, place = _resolve(options), find_place(os.environ)
        ranks = resolved.config.ranks
        if ranks is not None and place.how == "alone":
            return run_ranks(ranks, [sys.executable, "-m", "oktopk", *options.words])
        if hasattr(options, "ranks") and place.how != STARTED_BY_RANKS:
            raise ConfigError(f"--ranks starts ranks by itself, but this is one of {place.world} ({place.how})")
    except (OkTopkError, OSError) as error:
        complain("doctor", error)
        return 2 if isinstance(error, ConfigError) else 1
    return _examine(options, resolved, place)


def _resolve(options: argparse.Namespace) -> Resolved:
    """As the trainer would; data alone stands for the first network that is trained on it."""
    chosen = given(options)
    if "dataset" in chosen and "dnn" not in chosen and options.config is None:
        fitting = [workload.dnn for workload in WORKLOADS.values() if workload.dataset == chosen["dataset"]]
        chosen["dnn"] = fitting[0] if fitting else TrainConfig.dnn
    return resolve(chosen, os.environ, options.config)


def _examine(options: argparse.Namespace, resolved: Resolved, place: Place) -> int:
    config = resolved.config
    asked = Asked(place.how, place.world, config.nworkers, options.params, config.density)
    if config.out is not None:
        asked = replace(asked, out=config.out)
    try:
        with raising(signal.SIGTERM):
            return _told(asked, _data(resolved, place), place, config.timeout, options.json)
    except KeyboardInterrupt as error:
        return interrupted_code(error)


def _told(asked: Asked, data: Data | None, place: Place, timeout: float, as_json: bool) -> int:
    code = None
    try:
        with joined(place, timeout) as comm:
            world = examine(comm, asked, data)
            code = _tell(world, place, as_json)
            if world.broken is None:
                comm.all_gather_ints([0], "doctor")  # nobody leaves before rank 0 has spoken
    except Exception as error:  # whatever keeps ranks from coming together is a finding
        if code is None:
            reason = (sentence(error) or type(error).__name__).splitlines()[0]
            apart = f"they did not come together: {reason}"
            code = _tell(examine_alone(asked, apart, data), place, as_json)
    return code


def _data(resolved: Resolved, place: Place) -> Data | None:
    """What the trainer would find at its start. Without a network or data to look at, nothing."""
    config = resolved.config
    if config.data_dir is None and resolved.origins["dnn"] == DEFAULT:
        return None

    def look() -> dict[str, Any]:
        share = Share(place.rank, place.world, config.batch_size or 1, config.nsteps_update, config.seed)
        task = config.workload.build(Source(config.data_dir, config.min_seconds), share)
        return {
            "data": task.data,
            "left_out": len(task.problems),
            "problems": [f"{problem!s:.200}" for problem in task.problems[:SHOWN]],
            "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        }

    return look


def _tell(world: World, place: Place, as_json: bool) -> int:
    """Rank 0 speaks for all; where ranks cannot talk to each other, the others say so."""
    findings = judged(world, CHECKS)
    if place.rank == 0:
        print(json.dumps(_report(world, findings), indent=2) if as_json else _text(findings), flush=True)
    elif world.broken is not None:
        complain("doctor", OkTopkError(world.broken), f"rank {place.rank}: ")
        time.sleep(LAST_WORDS)
    return exit_code(findings)


def _report(world: World, findings: list[Finding]) -> dict[str, Any]:
    return {
        "how": world.asked.how,
        "world": world.size,
        "findings": [asdict(finding) for finding in findings],
        "facts": list(world.facts),
        "measured": dict(world.measured),
    }


def _text(findings: list[Finding]) -> str:
    problems, warnings = (_count(findings, level) for level in (PROBLEM, WARNING))
    return f"{rendered(findings)}\n{problems}, {warnings}"


def _count(findings: list[Finding], level: str) -> str:
    number = sum(finding.level == level for finding in findings)
    return f"{number or 'no'} {level}{'s' * (number > 1)}"
