"""Predict time and bytes of an all-reduce on P ranks, from recorded messages and a network model.

    oktopk simulate --ranks 2..1024 --params 25M --density 0.01 --net 10gbit:50us
    oktopk simulate --ranks 2,3,5 --algorithms dense,topka,oktopk --figure simulate.png
    oktopk simulate --ranks 2..64 --calibrate 1gbit
    oktopk simulate --ranks 2..16 --dnn gpt --optimizer adamw --net 100mbit:50us   is sparse faster for this model?
    oktopk simulate --ranks 2..16 --params 25M --compute-seconds 0.25 --net 1gbit:50us   … for your own model

The real algorithms run on P ranks, as threads of this process, with a smaller tensor. Their messages are recorded,
scaled to --params, and replayed on the network model. The compute time of a rank is measured on this machine.
With --dnn or --compute-seconds, a second table has whole training steps and B*, the link rate below which an
algorithm is faster than dense. Notes under the tables say what is measured and what is modelled.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import OkTopkError
from oktopk.tools import simulate as tool
from oktopk.tools.cores import available_cores
from oktopk.tools.lab import enter_user_namespace, lab_problem, parse_rate
from oktopk.tools.model_step import ModelStep, time_model_step
from oktopk.tools.plotting import figure_problem
from oktopk.train.building import build_task
from oktopk.train.config.options import ConfigError, TrainConfig
from oktopk.train.config.origins import resolve
from oktopk.utils.registry import PluginError
from oktopk.utils.signals import interrupted_code, raise_on_signal

from ..errors import print_error
from ..options import add_model_step, add_option, check_model_step, collect_options
from ..parser import add_alias
from ..parsing import parse_count, split_list

MOST = 1024
"""The limit on ranks: a step has P² messages, and every rank is a thread of this process."""
_MOST_AT_ONCE = 16
"""The limit on processes that measure the cost of a message."""
_LOOPBACK = "loopback"
_PARAMS = 25_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    every = ", ".join(ALGORITHMS.names())
    parser.add_argument(
        "--ranks",
        default="2..64",
        metavar="LIST",
        help="numbers of ranks, like 2,3,5; 2..64 means the powers of two (default: 2..64)",
    )
    parser.add_argument(
        "--params",
        type=parse_count,
        metavar="N",
        help="entries of the gradient (default: the parameters of --dnn, else 25M)",
    )
    add_model_step(parser)
    group = parser.add_argument_group("options of oktopk train, to time a network")
    add_option(group, "dnn", default="none")
    for name in ("data_dir", "batch_size"):
        add_option(group, name)
    parser.add_argument(
        "--density", default="0.01", metavar="X", help="share of entries that a rank sends (default: 0.01)"
    )
    parser.add_argument(
        "--net", default="10gbit:50us", metavar="RATE:LATENCY[:OVERHEAD]",
        help="link of each rank (default: 10gbit:50us). The overhead is the time that a rank spends on "
        "one message; it is measured over TCP unless given, as in 10gbit:50us:4us",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", nargs="?", const=_LOOPBACK, metavar="RATE",
        help="measure the link instead of --net: between network namespaces at this rate, like 1gbit; without "
        "a rate, or where namespaces are not allowed, on loopback",
    )  # fmt: skip
    parser.add_argument("--algorithms", metavar="A,B,…", help=f"algorithms to simulate (default: all): {every}")
    add_alias(parser, "--algorithm", "algorithms")
    parser.add_argument("--ranks-per-core", default="1", metavar="N", help="ranks that share a core (default: 1)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="plot the results to this .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> int:
    try:
        config = _model(options)
        question, ranks_per_core = _question(options)
    except (tool.SimulationError, ConfigError) as error:
        print_error("simulate", error)
        return 2
    if options.calibrate not in (None, _LOOPBACK):
        enter_user_namespace()
    try:
        with raise_on_signal(signal.SIGTERM):
            report = _simulate(options, _time_model(options, question, config), ranks_per_core)
    except (OkTopkError, OSError, ImportError) as error:
        print_error("simulate", error)
        return 1
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return interrupted_code(error)
    print(json.dumps(report, indent=2) if options.json else tool.text(report))
    return 0


def _model(options: argparse.Namespace) -> TrainConfig | None:
    """The options of the network to time; None without one."""
    names = ("dnn", "data_dir", "batch_size")
    chosen = {name: value for name, value in collect_options(options).items() if name in names}
    check_model_step(options, "dnn" in chosen)
    if "dnn" not in chosen and chosen.keys() & {"data_dir", "batch_size"}:
        raise ConfigError("--data-dir and --batch-size need a network to time: pass --dnn NAME")
    return resolve(chosen, {}).config if "dnn" in chosen else None


def _time_model(options: argparse.Namespace, question: tool.Question, config: TrainConfig | None) -> tool.Question:
    """Add the step of the model, as given or timed in this process, and its parameters unless given."""
    step = None if options.compute_seconds is None else ModelStep.given(options.compute_seconds)
    if config is None:
        return replace(question, step=step)
    task = build_task(config, 0, 1)
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    step = step or time_model_step(config, task, options.optimizer)
    return replace(question, size=options.params or parameters, step=step)


def _simulate(options: argparse.Namespace, question: tool.Question, ranks_per_core: int) -> dict[str, Any]:
    link, at_once = tool.GIVEN, max(2, min(ranks_per_core * len(available_cores()), _MOST_AT_ONCE))
    with Progress(len(question.ranks) * len(question.algorithms)) as progress:
        progress.show("measuring the cost of messages and compute on this machine")
        network = question.network
        if options.calibrate:
            network, link = _calibrate(options.calibrate, at_once)
        elif network.overhead is None:
            network = replace(network, overhead=tool.calibrate_loopback(at_once).overhead)
            link = tool.HALF_GIVEN
        question = replace(question, network=network)
        costs = tool.measure(question.algorithms, question.size, question.density, ranks_per_core)
        answers = tool.simulate(question, costs, progress.step)
    if options.figure:
        tool.draw(options.figure, question, answers)
    return tool.report(question, costs, answers, link)


class Progress:
    """A progress line, on a terminal only."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, words: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    def step(self, words: str) -> None:
        full = 24 * self.done // self.total
        self.show(f"[{'#' * full}{'.' * (24 - full)}] {self.done}/{self.total}  {words}")
        self.done += 1


def _calibrate(rate: str, ranks: int) -> tuple[tool.Network, str]:
    problem = None if rate == _LOOPBACK else lab_problem()
    if problem:
        print(f"oktopk simulate: measuring loopback instead of {rate}: {problem}", file=sys.stderr)
    if problem or rate == _LOOPBACK:
        return tool.calibrate_loopback(ranks), f"between {ranks} ranks on loopback"
    return tool.calibrate_lab(rate, ranks), f"between {ranks} hosts in namespaces at {rate}"


# Options.


def _question(options: argparse.Namespace) -> tuple[tool.Question, int]:
    names = list(ALGORITHMS) if options.algorithms is None else split_list(options.algorithms)
    if not names:
        raise tool.SimulationError("pass at least one algorithm")
    for name in names:
        try:
            ALGORITHMS.find(name)
        except (ValueError, PluginError) as error:
            raise tool.SimulationError(f"--algorithms: {error}") from error
    if options.figure and (problem := figure_problem(options.figure)):
        raise tool.SimulationError(problem)
    size, density = options.params or _PARAMS, _number("--density", options.density, float)
    if not 0 < density <= 1:
        raise tool.SimulationError(f"--density must be in (0, 1], got {options.density}")
    if size * density < 1:
        raise tool.SimulationError(f"--density {options.density} of {size} parameters is less than one entry")
    if options.calibrate not in (None, _LOOPBACK):
        _check_rate(options.calibrate)
    per_core = _number("--ranks-per-core", options.ranks_per_core, int)
    if not 1 <= per_core <= 64:
        raise tool.SimulationError(f"--ranks-per-core must be in 1..64, got {per_core}")
    network = tool.parse_network(options.net)
    return tool.Question(parse_ranks(options.ranks), names, size, density, network), per_core


def _check_rate(rate: str) -> None:
    try:
        parse_rate(rate)
    except ValueError as error:
        raise tool.SimulationError(f"--calibrate: {error}") from error


def _number(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise tool.SimulationError(f"{name} must be a number, got {text!r}") from error


def parse_ranks(text: str) -> list[int]:
    """Parse numbers of ranks; a range stands for its powers of two.

    >>> parse_ranks("2..16"), parse_ranks("2,3,5"), parse_ranks("1,4..8")
    ([2, 4, 8, 16], [2, 3, 5], [1, 4, 8])
    """
    found: set[int] = set()
    for word in text.split(","):
        low, mark, high = word.partition("..")
        first, last = (_number("--ranks", edge, int) for edge in (low, high if mark else low))
        if not 1 <= first <= last <= MOST:
            raise tool.SimulationError(f"--ranks must be in 1..{MOST}, like 2..64 or 2,3,5, got {word!r}")
        powers = [1 << e for e in range(MOST.bit_length()) if first <= 1 << e <= last]
        if mark and not powers:
            raise tool.SimulationError(f"--ranks {word}: there is no power of two in this range")
        found.update(powers if mark else [first])
    return sorted(found)
