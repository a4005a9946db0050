"""Check this machine, or all ranks of a job: can it train, how fast are its links, is sparse faster than dense?

    oktopk doctor                                                        check this machine
    oktopk doctor --ranks 2 --dnn gpt --optimizer adamw --link 100mbit   is sparse faster for this model and rate?
    oktopk doctor --ranks 2 --params 25M --compute-seconds 0.25          … for your own model
    torchrun --nproc-per-node 4 -m oktopk doctor --dnn lstman4 --data-dir audio_data --nworkers 4
                                                                         what a job would use, before it starts
    mpirun -np 2 oktopk doctor                                           the same under MPI
    oktopk doctor --gpu                                                  is the GPU path right and fast here?

With --dnn or --params, the last check says whether compression pays here: the time of a step without
communication, what dense and sparse averaging add to it, and B*, the rate of the links below which sparse is
faster. It compares steps; oktopk race compares the time to the same quality.

Each check prints one line: ok, warning or problem, what it found, and what to do about it. The exit code is 1 if
there is a problem, else 0, on every rank.
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
    GPU_CHECKS,
    PROBLEM,
    WARNING,
    Finding,
    Request,
    World,
    examine,
    examine_alone,
    exit_code,
    format_findings,
    run_checks,
)
from oktopk.tools.model_step import ModelStep, time_model_step
from oktopk.train.building import build_task
from oktopk.train.config.options import DEFAULT, ConfigError, TrainConfig
from oktopk.train.config.origins import ResolvedConfig, resolve
from oktopk.train.launch import STARTED_BY_RANKS, RankInfo, connect, detect_rank, run_ranks
from oktopk.train.tasks import WORKLOADS, Task
from oktopk.utils.schemas import add_schema
from oktopk.utils.signals import interrupted_code, raise_on_signal

from ..errors import describe_error, print_error
from ..options import add_config, add_model_step, add_option, check_model_step, collect_options
from ..parsing import parse_count, parse_link, parse_number

TIMEOUT = 60.0
SHOWN = 5
"""Data problems to list."""
PRINT_SECONDS = 1.0
"""When ranks cannot reach each other, give rank 0 this long to print: launchers end all ranks once one has failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--params", type=parse_count, metavar="N", help="number of parameters, like 25M (default: that of --dnn)"
    )
    parser.add_argument(
        "--timeout",
        type=parse_number,
        default=TIMEOUT,
        metavar="S",
        help="seconds to wait for another rank before giving up (default: 60)",
    )
    parser.add_argument(
        "--link",
        type=parse_link,
        metavar="RATE",
        help="predict for links of this rate, like 100mbit (default: the rate that is measured)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="examine kernels, streams, host waits and two GPUs instead; without one, what a CPU can show",
    )
    add_model_step(parser)
    group = parser.add_argument_group("options of oktopk train")
    add_option(group, "dnn", default="none; with --data-dir alone, lstman4")
    for name in ("dataset", "data_dir", "batch_size", "density", "nworkers", "ranks"):
        add_option(group, name)
    add_option(group, "out", ": doctor checks that all ranks can write there")


def run(options: argparse.Namespace) -> int:
    logging.getLogger("oktopk").addHandler(logging.NullHandler())  # findings report what it warns about
    if options.gpu:
        return _examine_gpu(options.json)
    try:
        resolved, info = _resolve(options), detect_rank(os.environ)
        check_model_step(options, _has_model(resolved))
        ranks = resolved.config.ranks
        if ranks is not None and info.launcher == "alone":
            return run_ranks(ranks, [sys.executable, "-m", "oktopk", *options.words])
        if hasattr(options, "ranks") and info.launcher != STARTED_BY_RANKS:
            raise ConfigError(f"--ranks starts ranks by itself, but this is one of {info.world} ({info.launcher})")
    except (OkTopkError, OSError) as error:
        print_error("doctor", error)
        return 2 if isinstance(error, ConfigError) else 1
    return _examine(options, resolved, info)


def _examine_gpu(as_json: bool) -> int:
    world = World(())
    try:
        with raise_on_signal(signal.SIGTERM):
            findings = run_checks(world, GPU_CHECKS)
    except KeyboardInterrupt as error:
        return interrupted_code(error)
    print(json.dumps(_to_json(world, findings), indent=2) if as_json else _text(findings), flush=True)
    return exit_code(findings)


def _resolve(options: argparse.Namespace) -> ResolvedConfig:
    """Resolve options as the trainer does; --dataset alone selects the first network trained on it."""
    chosen = collect_options(options)
    if "dataset" in chosen and "dnn" not in chosen and options.config is None:
        fitting = [workload.dnn for workload in WORKLOADS.values() if workload.dataset == chosen["dataset"]]
        chosen["dnn"] = fitting[0] if fitting else TrainConfig.dnn
    return resolve(chosen, os.environ, options.config)


def _examine(options: argparse.Namespace, resolved: ResolvedConfig, info: RankInfo) -> int:
    config = resolved.config
    density = config.density if isinstance(config.density, float) else config.min_density
    request = Request(
        *(info.launcher, info.world, config.nworkers, options.params, density),
        compute_seconds=options.compute_seconds,
        link=options.link,
    )
    model = _Model(resolved, info, options.optimizer) if _has_model(resolved) else None
    if config.out is not None:
        request = replace(request, out=config.out)
    try:
        with raise_on_signal(signal.SIGTERM):
            return _report(request, model, info, config.timeout, options.json)
    except KeyboardInterrupt as error:
        return interrupted_code(error)


def _report(request: Request, model: _Model | None, info: RankInfo, timeout: float, as_json: bool) -> int:
    code = None
    data, time_model = (None, None) if model is None else (model.load, model.time)
    try:
        with connect(info, timeout) as comm:
            world = examine(comm, request, data, time_model)
            code = _print(world, info, as_json)
            if world.broken is None:
                comm.all_gather_ints([0], "doctor")  # nobody leaves before rank 0 has printed
    except Exception as error:  # any failure to connect is a finding
        if code is None:
            reason = (describe_error(error) or type(error).__name__).splitlines()[0]
            broken = f"they did not connect: {reason}"
            code = _print(examine_alone(request, broken, data), info, as_json)
    return code


def _has_model(resolved: ResolvedConfig) -> bool:
    return resolved.config.data_dir is not None or resolved.origins["dnn"] != DEFAULT


class _Model:
    """The data and model that the trainer would use on this rank."""

    def __init__(self, resolved: ResolvedConfig, info: RankInfo, optimizer: str | None) -> None:
        self.config, self.info, self.optimizer = resolved.config, info, optimizer
        self.task: Task[Any] | None = None

    def load(self) -> dict[str, Any]:
        task = self.task = build_task(self.config, self.info.rank, self.info.world, self.info.local_rank)
        return {
            "data": task.data,
            "left_out": len(task.problems),
            "problems": [f"{problem!s:.200}" for problem in task.problems[:SHOWN]],
            "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        }

    def time(self) -> ModelStep:
        assert self.task is not None  # examine() does not time a model that could not be loaded
        return time_model_step(self.config, self.task, self.optimizer)


def _print(world: World, info: RankInfo, as_json: bool) -> int:
    """Print the findings on rank 0; the other ranks only report that they could not reach each other."""
    findings = run_checks(world, CHECKS)
    if info.rank == 0:
        print(json.dumps(_to_json(world, findings), indent=2) if as_json else _text(findings), flush=True)
    elif world.broken is not None:
        print_error("doctor", OkTopkError(world.broken), f"rank {info.rank}: ")
        time.sleep(PRINT_SECONDS)
    return exit_code(findings)


def _to_json(world: World, findings: list[Finding]) -> dict[str, Any]:
    document = {
        "how": world.request.launcher,
        "world": world.size,
        "findings": [asdict(finding) for finding in findings],
        "facts": list(world.facts),
        "measured": dict(world.measured),
    }
    return add_schema("doctor", document)


def _text(findings: list[Finding]) -> str:
    problems, warnings = (_count(findings, level) for level in (PROBLEM, WARNING))
    return f"{format_findings(findings)}\n{problems}, {warnings}"


def _count(findings: list[Finding], level: str) -> str:
    number = sum(finding.level == level for finding in findings)
    return f"{number or 'no'} {level}{'s' * (number > 1)}"
