"""Train a small speech recogniser twice over a slow link, dense and with oktopk, for the same time.

    oktopk demo
    oktopk demo --link 20mbit --seconds 90 --out FOLDER

Two ranks of this machine are hosts in network namespaces with a link between them. Where the system does not allow
that, they are on loopback, and pause after each step as long as the link would take for its bytes: the demo says
which. The speech comes with the package. The clock counts training steps only; kernels are compiled before it
starts. FOLDER gets race.html, a page with both runs, and all that `oktopk race` writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oktopk.tools.hooks import DDP
from oktopk.tools.lab import enter_user_namespace, lab_problem
from oktopk.tools.race.links import PACED, needs_lab

from ..parser import Parser
from ..parsing import parse_number
from . import race

OURS = "oktopk:density=0.01:values=fp16:warmup_steps=16:ramp_steps=48:norm_clip=40:auto=False"
"""Fixed settings, so that the demo shows the same on every machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=parse_number, default=60.0, metavar="N", help="training time of each (default: 60)"
    )
    parser.add_argument(
        "--link", default="100mbit", metavar="RATE",
        help="rate of the link between the ranks; paced:RATE: by pauses, without namespaces (default: 100mbit)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the results (default: oktopk-demo-DATE)"
    )


def run(options: argparse.Namespace) -> int:
    link = _choose_link(options.link)
    out = options.out or Path(time.strftime("oktopk-demo-%Y%m%d-%H%M%S"))
    words = [
        "--config", "demo", "--seconds", f"{options.seconds:g}", "--link", link,
        "--contenders", f"{DDP},{OURS}", "--val-every-steps", "100", "--out", str(out),
    ]  # fmt: skip
    print(
        f"A speech recogniser of a million parameters learns on two ranks, {options.seconds:g} s dense (DDP), "
        f"then {options.seconds:g} s with oktopk, over {link.removeprefix(PACED)}. The same as:\n"
        f"    oktopk race {shlex.join(words)}",
        file=sys.stderr,
        flush=True,
    )
    parser = Parser(prog="oktopk demo")
    race.add_arguments(parser)
    code = race.run(parser.parse_args(words))
    if code == 0:
        print(conclude(json.loads((out / "race.json").read_text()), options.seconds))
        print(f"both runs on one page: {out / 'race.html'}")
    return code


def _choose_link(link: str) -> str:
    """The link, or if this system has no network namespaces, a paced one; says which."""
    if not needs_lab(link):
        return link
    enter_user_namespace()  # which starts this program again, so that it comes before any work
    problem = lab_problem()
    if problem is None:
        print("the link: between two hosts in network namespaces of this machine", file=sys.stderr)
        return link
    print(f"the link: emulated by pauses on loopback, because {problem}", file=sys.stderr)
    return f"{PACED}{link}"


def conclude(document: Mapping[str, Any], seconds: float) -> str:
    """What both have reached, in a sentence.

    >>> rows = [{"contender": "ddp", "steps": {"mean": 150}, "final": {"mean": 0.987}},
    ...         {"contender": "oktopk", "steps": {"mean": 700}, "final": {"mean": 0.03}}]
    >>> conclude({"rows": rows}, 60)
    'in the same 60 seconds: dense WER 98.7 % (150 steps), oktopk WER 3.0 % (700 steps)'
    """
    reached = {"dense" if row["contender"] == DDP else "oktopk": row for row in document["rows"]}
    said = [
        f"{name} WER {100 * reached[name]['final']['mean']:.1f} % ({reached[name]['steps']['mean']:.0f} steps)"
        for name in ("dense", "oktopk")
    ]
    return f"in the same {seconds:g} seconds: {', '.join(said)}"
