"""How would it scale? Time and bytes of a reduction on P ranks, from real messages and a model of the network.

    oktopk simulate --ranks 2..1024 --params 25M --density 0.01 --net 10gbit:50us
    oktopk simulate --ranks 2,3,5 --algorithms dense,topka,oktopk --figure simulate.png
    oktopk simulate --ranks 2..64 --calibrate 1gbit

The algorithms themselves run on P ranks, which are threads of this process, with a smaller tensor; their messages
are recorded, scaled to --params, and replayed on the network. The work of a rank is measured on this machine. What
is measured and what is modelled is said below the table.
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
from oktopk.tools.cores import own_cores
from oktopk.tools.drawing import drawing_problem
from oktopk.tools.lab import lab_problem, parse_rate
from oktopk.utils.signals import interrupted_code, raising

from ..complaint import complain
from ..lists import words
from ..numbers import count

MOST = 1024
"""A step has P² messages, and all ranks are threads of this process."""
_MOST_AT_ONCE = 16
"""Processes that measure what a message costs."""
_LOOPBACK = "loopback"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    every = ",".join(ALGORITHMS)
    parser.add_argument(
        "--ranks",
        default="2..64",
        metavar="LIST",
        help="like 2,3,5; 2..64 are the powers of two (default: 2..64)",
    )
    parser.add_argument(
        "--params", type=count, default="25M", metavar="N", help="entries of the tensor (default: 25M)"
    )
    parser.add_argument("--density", default="0.01", metavar="X", help="of what a rank sends (default: 0.01)")
    parser.add_argument(
        "--net", default="10gbit:50us", metavar="RATE:LATENCY[:OVERHEAD]",
        help="of every rank's link (default: 10gbit:50us); the overhead of a message, during which a rank does "
        "nothing else, is measured over TCP unless it is given, like 10gbit:50us:4us",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", nargs="?", const=_LOOPBACK, metavar="RATE",
        help="measure the link instead: between hosts in network namespaces at this rate, like 1gbit (root), "
        "or, without a rate or root, on the loopback of this machine",
    )  # fmt: skip
    parser.add_argument("--algorithms", default=every, metavar="A,B,…", help=f"(default: {every})")
    parser.add_argument("--ranks-per-core", default="1", metavar="N", help="ranks that share a core (default: 1)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw it, like simulate.png")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    try:
        question, ranks_per_core = _question(options)
    except tool.SimulationError as error:
        complain("simulate", error)
        return 2
    try:
        with raising(signal.SIGTERM):
            report = _simulate(options, question, ranks_per_core)
    except (OkTopkError, OSError) as error:
        complain("simulate", error)
        return 1
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return interrupted_code(error)
    print(json.dumps(report, indent=2) if options.json else tool.text(report))
    return 0


def _simulate(options: argparse.Namespace, question: tool.Question, ranks_per_core: int) -> dict[str, Any]:
    link, at_once = tool.GIVEN, max(2, min(ranks_per_core * len(own_cores()), _MOST_AT_ONCE))
    with Progress(len(question.ranks) * len(question.algorithms)) as progress:
        progress.say("measuring what messages and work cost on this machine")
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
    """One line that changes, on a terminal only."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.say("")

    def say(self, words: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    def step(self, words: str) -> None:
        full = 24 * self.done // self.total
        self.say(f"[{'#' * full}{'.' * (24 - full)}] {self.done}/{self.total}  {words}")
        self.done += 1


def _calibrate(rate: str, ranks: int) -> tuple[tool.Network, str]:
    problem = None if rate == _LOOPBACK else lab_problem()
    if problem:
        print(f"oktopk simulate: measuring the loopback instead of {rate}: {problem}", file=sys.stderr)
    if problem or rate == _LOOPBACK:
        return tool.calibrate_loopback(ranks), f"between {ranks} ranks on the loopback"
    return tool.calibrate_lab(rate, ranks), f"between {ranks} hosts in namespaces at {rate}"


# Options.


def _question(options: argparse.Namespace) -> tuple[tool.Question, int]:
    names = words(options.algorithms)
    if not names:
        raise tool.SimulationError("give at least one algorithm")
    for name in names:
        if name not in ALGORITHMS:
            raise tool.SimulationError(f"unknown algorithm {name!r}: choose among {', '.join(ALGORITHMS)}")
    if options.figure and (problem := drawing_problem(options.figure)):
        raise tool.SimulationError(problem)
    size, density = options.params, _number("--density", options.density, float)
    if not 0 < density <= 1:
        raise tool.SimulationError(f"--density must be in (0, 1], got {options.density}")
    if size * density < 1:
        raise tool.SimulationError(f"--density {options.density} of {size} parameters is less than one entry")
    if options.calibrate not in (None, _LOOPBACK):
        _check_rate(options.calibrate)
    each = _number("--ranks-per-core", options.ranks_per_core, int)
    if not 1 <= each <= 64:
        raise tool.SimulationError(f"--ranks-per-core must be in 1..64, got {each}")
    network = tool.parse_network(options.net)
    return tool.Question(ranks(options.ranks), names, size, density, network), each


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


def ranks(text: str) -> list[int]:
    """
    >>> ranks("2..16"), ranks("2,3,5"), ranks("1,4..8")
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
            raise tool.SimulationError(f"--ranks {word}: there is no power of two in between")
        found.update(powers if mark else [first])
    return sorted(found)
