"""Train several contenders over emulated links to the same quality, and compare wall time.

    oktopk race --config gpt_race --target "val loss<=2.2" --link 1gbit,100mbit --out FOLDER \\
        --contenders ddp,ddp-fp16,powersgd:4,accumulate:4,oktopk:density=0.05:values=fp16:warmup_steps=10
    oktopk race --config gpt_race --seconds 120 --link 100mbit --seeds 0,1,2 --out FOLDER    the same time for each
    oktopk race --config gpt_race --target "val loss<=2.2" --composed --link 1gbit,100mbit,20mbit --out FOLDER
    oktopk race --config lstman4_small --target "val WER<=0.5" --link none --out FOLDER -- --data-dir an4_data
    oktopk race --report FOLDER                                                  draw the outputs again
    oktopk race --report FOLDER --target "val loss<=2.1"                         … for another target

Every contender trains the same task with the same optimizer, schedule and clipping. The clock counts training
steps of the slowest rank, the dense warm-up included; validation and compilation are not counted. Options after --
are those of `oktopk train`. Finished cells (contender × link × seed) are kept: the same command continues after
Ctrl-C or a failure. FOLDER gets race.json, race.csv, race.html and race.svg. Links need root or user namespaces;
paced ones do not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import OkTopkError
from oktopk.tools.lab import MAX_HOSTS, enter_user_namespace, lab_problem
from oktopk.tools.plotting import figure_problem
from oktopk.tools.race.cells import Finished, find_finished
from oktopk.tools.race.contenders import parse_contender
from oktopk.tools.race.links import PACED, link_rate, needs_lab
from oktopk.tools.race.output import write_outputs
from oktopk.tools.race.output.figure import draw
from oktopk.tools.race.output.tables import text
from oktopk.tools.race.run import Failure, plan_cells, plan_composed, run_cells
from oktopk.tools.race.spec import Race, RaceError, Target, parse_target
from oktopk.tools.race.summary import build_summary
from oktopk.train.building import build_task
from oktopk.train.config.options import COMPRESSION, OPTIONS, OUTPUT, RANKS, ConfigError, parse
from oktopk.train.config.origins import resolve
from oktopk.train.launch import detect_rank
from oktopk.train.run import BAD_INPUT
from oktopk.utils.files import make_folder
from oktopk.utils.locks import FolderLock
from oktopk.utils.signals import interrupted_code, raise_on_signal

from ..errors import print_error
from ..options import add_config, collect_options
from ..parser import Parser, add_alias
from ..parsing import parse_number, parse_whole, split_list
from .train import add_arguments as add_train_arguments

CONTENDERS = "ddp,ddp-fp16,powersgd:4,accumulate:4,oktopk"
SET_BY_RACE = ("seed", "max_steps", "val_every", "norm_clip", "momentum_correction")
"""Options of `oktopk train` that the race or its contenders set, besides those about compression and output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ours = ", ".join(ALGORITHMS.names())
    add_config(parser)
    parser.add_argument(
        "--contenders",
        default=CONTENDERS,
        metavar="A,B,…",
        help=f"what to compare (default: {CONTENDERS}): ddp; ddp-fp16 and ddp-bf16, torch's 16-bit hooks; "
        "powersgd:R, torch's hook of rank R after start=20 dense steps; accumulate:N, DDP with N batches per "
        "step; an algorithm of oktopk with any settings, like "
        f"oktopk:density=0.05:values=fp16:warmup_steps=10:auto=False ({ours}; without settings, "
        "the defaults of OkTopkState); local, which averages the updates of every rank's own optimizer, like "
        "local:density=0.01:values=fp16 (without settings, the defaults of LocalOptimizer); hsdp-native:S and "
        "hsdp:S:density=0.01 (gradients) and local:shards=S (updates), models that FSDP2 shards over S ranks. "
        "Any of them takes lr=FACTOR for its learning rate",
    )
    parser.add_argument(
        "--link", default="100mbit", metavar="RATE,…",
        help="rates of links between hosts in network namespaces; none: processes on loopback; paced:RATE: the "
        "same with a pause after each step, as long as the link would take for its bytes (default: 100mbit)",
    )  # fmt: skip
    parser.add_argument("--seeds", default="0", metavar="S,T,…", help="seeds (default: 0)")
    add_alias(parser, "--seed", "seeds")
    parser.add_argument("--ranks", type=parse_whole, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument(
        "--ranks-per-host", type=parse_whole, default=1, metavar="N", help="ranks on each host (default: 1)"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--target",
        metavar="METRIC<=X",
        help='a cell ends when it reaches this quality, like "val loss<=1.90". Without it and --seconds, cells '
        "train to their last step; --report then takes any target",
    )
    end.add_argument(
        "--seconds",
        type=parse_number,
        metavar="N",
        help="train every cell for N seconds instead, and compare the last validation",
    )
    parser.add_argument(
        "--steps", type=parse_whole, metavar="N",
        help="limit in optimizer steps, and length of the learning rate schedule (default: the configuration's)",
    )  # fmt: skip
    parser.add_argument(
        "--val-every-steps", type=parse_whole, default=50, metavar="N",
        help="steps between validations (default: 50)",
    )  # fmt: skip
    parser.add_argument(
        "--composed", action="store_true",
        help="train each contender and seed once, on loopback; time steps on each link; compute the time to "
        "--target from both",
    )  # fmt: skip
    parser.add_argument(
        "--timing-steps",
        type=parse_whole,
        default=60,
        metavar="N",
        help="steady steps to time with --composed (default: 60)",
    )
    parser.add_argument(
        "--timeout", type=parse_number, default=7200.0, metavar="SECONDS",
        help="time limit for a cell (default: 7200)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the race: cells, tables and pictures"
    )
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only draw the outputs of this race again")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="another picture: .svg, .pdf or .png")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="options of `oktopk train`, for all cells")


def run(options: argparse.Namespace) -> int:
    try:
        if options.figure is not None and (problem := figure_problem(options.figure)):
            raise RaceError(problem)
        if options.report is not None:
            return _report(options)
        with raise_on_signal(signal.SIGTERM):
            return _race(options)
    except BAD_INPUT as error:
        print_error("race", error)
        return 2
    except OkTopkError as error:
        print_error("race", error)
        return 2 if isinstance(error, RaceError) else 1
    except KeyboardInterrupt as error:
        where = f": the same command continues the race in {options.out}" if options.out else ""
        print(f"interrupted{where}", file=sys.stderr)
        return interrupted_code(error)


def _race(options: argparse.Namespace) -> int:
    contenders, links, seeds = _lists(options)
    if options.out is None:
        raise RaceError("pass --out FOLDER: finished cells are kept there")
    limited = any(needs_lab(link) for link in links)
    if limited:
        enter_user_namespace()  # which starts this program again, so that it comes before any work
    race = _make_race(options)
    if limited and (problem := lab_problem()):
        instead = f"--link {PACED}{next(filter(needs_lab, links))} emulates it by pauses on loopback"
        raise RaceError(f"--link {options.link}: {problem}; {instead}")
    plan = plan_composed if options.composed else plan_cells
    make_folder(options.out)
    with closing(FolderLock(options.out)):
        failures = run_cells(
            race, plan(contenders, links, seeds), options.out, options.timeout, _show, _status(),
            on_change=lambda: _write(race, options.out),
        )  # fmt: skip
    _finish(options, _write(race, options.out, failures))
    return 1 if failures else 0


def _report(options: argparse.Namespace) -> int:
    cells, problems = find_finished(options.report)
    if not cells:
        raise RaceError(problems[0]) if problems else RaceError(f"{options.report} has no finished cells")
    race = cells[0].spec.race
    if options.target is not None:
        race = replace(race, target=_other_target(parse_target(options.target), cells))
    _finish(options, _write(race, options.report))
    return 0


def _other_target(target: Target, cells: Sequence[Finished]) -> Target:
    """The target, if cells that have ended without it can be judged by it."""
    for one in cells:
        names = {name for point in one.curve for name in point.metrics}
        if one.result.get("ended") == "target" and one.spec.race.target != target:
            raise RaceError(
                f"--target {target}: {one.spec.cell} ended when it reached {one.spec.race.target}. Another target "
                "needs cells that were trained without one"
            )
        if one.curve and target.metric not in names:
            raise RaceError(
                f"--target {target}: no metric {target.metric!r}; there are {', '.join(sorted(names))}"
            )
    return target


def _finish(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.figure is not None and document["trials"]:
        draw(document, options.figure)
    print(json.dumps(document, indent=2) if options.json else text(document))


def _write(race: Race, out: Path, failures: Sequence[Failure] = ()) -> dict[str, Any]:
    cells, problems = find_finished(out)
    failed = {**dict.fromkeys(problems, "kept cell"), **{one.problem: str(one.cell) for one in failures}}
    document = build_summary(race, cells, [{"cell": cell, "problem": problem} for problem, cell in failed.items()])
    for problem in write_outputs(document, out):
        print(f"oktopk race: {problem}", file=sys.stderr)
    return document


def _lists(options: argparse.Namespace) -> tuple[list[str], list[str], list[int]]:
    """Contenders, links and seeds; rejects bad ones before anything runs."""
    contenders, links = split_list(options.contenders), split_list(options.link)
    seeds = [parse("seed", word, "--seeds") for word in split_list(options.seeds)]
    for what, found in (("contender", contenders), ("link", links), ("seed", seeds)):
        if not found:
            raise RaceError(f"pass at least one {what}")
    parsed = [parse_contender(name) for name in contenders]
    for link in links:
        try:
            link_rate(link)
        except ValueError as error:
            raise RaceError(f"--link: {error}") from None
    follows = [one.name for one in parsed if one.follows_link]
    if options.composed and follows:
        raise RaceError(
            f"--composed needs the same steps on every link, but auto of {follows[0]} chooses by the link: add "
            "auto=False and a density that is a number, or run it in full"
        )
    return contenders, links, seeds


def _make_race(options: argparse.Namespace) -> Race:
    for name, value in (("steps", options.steps), ("val-every-steps", options.val_every_steps),
                        ("timing-steps", options.timing_steps), ("seconds", options.seconds)):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            raise RaceError(f"--{name} must be above 0, got {value:g}")
    if options.ranks < 2:
        raise RaceError(f"--ranks must be at least 2, got {options.ranks}: one rank has nothing to send")
    per_host = options.ranks_per_host
    if per_host < 1 or options.ranks % per_host or options.ranks == per_host > 1:
        raise RaceError(
            f"--ranks-per-host is {per_host}: --ranks, {options.ranks}, must be a multiple of it, and larger"
        )
    if options.ranks // per_host > MAX_HOSTS and any(map(needs_lab, split_list(options.link))):
        raise RaceError(f"--link makes a network of at most {MAX_HOSTS} hosts, and --ranks is {options.ranks}")
    if options.composed and options.seconds is not None:
        raise RaceError("--composed trains to a --target or to the last step: leave out --seconds")
    target = None if options.target is None else parse_target(options.target)
    return Race(
        _make_config(options), options.ranks, options.steps, options.seconds, target, options.val_every_steps,
        options.timing_steps, ranks_per_host=per_host,
    )  # fmt: skip


def _make_config(options: argparse.Namespace) -> dict[str, Any]:
    """Resolve the trainer's options, and build the task once: missing data is found before any cell runs."""
    if detect_rank(os.environ).world > 1:
        raise RaceError("a race starts its own ranks: call it with --ranks N, without mpirun, torchrun or srun")
    parser = Parser(prog="oktopk race … --", add_help=False)
    add_train_arguments(parser)
    parsed = parser.parse_args(options.options)
    chosen = collect_options(parsed)
    topics = {name: item.metadata["topic"] for name, item in OPTIONS.items()}
    for name in chosen:
        if name in SET_BY_RACE or topics[name] in (COMPRESSION, RANKS, OUTPUT):
            raise ConfigError(f"--{name.replace('_', '-')} after --: the race or its contenders set it")
    if parsed.config is not None:
        raise ConfigError("--config after --: pass it before")
    config = resolve(chosen, os.environ, options.config).config
    build_task(config, 0, options.ranks)
    ours = {name for name in OPTIONS if name in SET_BY_RACE or topics[name] in (COMPRESSION, OUTPUT)}
    defaults = {
        name: OPTIONS[name].default for name in ours
    }  # not those of the configuration: contenders have them
    known = {**asdict(config), **defaults, "ranks": None, "nworkers": None}
    return {
        name: str(value.resolve()) if isinstance(value, Path) else value
        for name, value in known.items()
        if name != "seed"
    }


def _show(line: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{line}", file=sys.stderr, flush=True)


def _status() -> Any:
    """A line that is overwritten, on a terminal."""
    if not sys.stderr.isatty():
        return None
    width = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    return lambda line: print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
