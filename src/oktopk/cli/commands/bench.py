"""Compare all algorithms with PyTorch's own ways on the same gradients: time, CPU, bytes, and what is hidden.

    oktopk bench --ranks 2                                         processes on this machine, no limit
    oktopk bench --ranks 4 --link none,1gbit,100mbit               in a lab of network namespaces (needs root)
    oktopk bench --link 1gbit --model transformer --bucket-mb 1    a network that computes
    oktopk bench --contenders ddp,powersgd,oktopk --figure bench.png
    oktopk bench --contenders ddp,oktopk,oktopk:fp16,oktopk:auto   variants of ours
    oktopk bench --link 1gbit --ranks-per-host 2 --contenders ddp,oktopk,oktopk:hosts

A step is the backward pass with the exchange of gradients; forward and optimizer do not count. Contenders take
turns step by step, so that what disturbs the machine disturbs all of them. Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from oktopk.errors import OkTopkError
from oktopk.tools.bench.figures import Record
from oktopk.tools.bench.launch import NO_LIMIT, measure
from oktopk.tools.bench.names import CONTENDERS, VARIANTS, BenchError, with_link_limits
from oktopk.tools.bench.picture import draw
from oktopk.tools.bench.plan import Plan, free_memory
from oktopk.tools.bench.tables import phases, text
from oktopk.tools.bench.workloads import MODELS
from oktopk.tools.drawing import drawing_problem
from oktopk.tools.lab import lab_problem, parse_rate
from oktopk.utils.signals import interrupted_code
from oktopk.wire.message import VALUE_CODES

from ..complaint import complain
from ..lists import words
from ..numbers import count

NO_LINK = (
    "loopback: nothing limits the link, and no interface counts bytes; --link 1gbit measures in a lab (needs root)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = ", ".join(f"{name} {size / 1e6:.4g}M" for name, (size, _) in MODELS.items())
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share a host and its link (default: 1)",
    )
    parser.add_argument(
        "--link", metavar="RATE,…", help="in a lab, with links of these rates: none, 1gbit, 100mbit"
    )
    parser.add_argument("--model", default="resnet50-shapes", choices=MODELS, help="(default: resnet50-shapes)")
    parser.add_argument(
        "--params", type=count, metavar="N", help=f"size of the model, like 25M (default: {sizes})"
    )
    parser.add_argument(
        "--contenders",
        default=",".join(CONTENDERS),
        metavar="A,B,…",
        help=f"(default: all) {', '.join(CONTENDERS)}; ours also as oktopk:fp16, by {', '.join(VARIANTS)}",
    )
    parser.add_argument("--steps", type=int, default=15, metavar="N", help="steps that count (default: 15)")
    parser.add_argument("--density", type=float, default=0.01, metavar="X", help="(default: 0.01)")
    parser.add_argument("--values", default="fp32", choices=VALUE_CODES, help="on the wire (default: fp32)")
    parser.add_argument("--bucket-mb", type=float, metavar="X", help="size of DDP's buckets (default: DDP's own)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="for each link (default: 1800)"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the step times: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    records: list[Record] = []
    code = 0
    try:
        plan, links = _plan(options)
        if not links:
            print(NO_LINK, file=sys.stderr)
        for found in measure(plan, links):
            records += found
    except (OkTopkError, OSError) as error:
        complain("bench", error)
        code = 2 if isinstance(error, BenchError) else 1
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        code = interrupted_code(error)
    return _show(options, records) or code  # of the links before, if something went wrong


def _plan(options: argparse.Namespace) -> tuple[Plan, list[str]]:
    """What to measure on which links; what is wrong is said before anything is measured."""
    names, links = with_link_limits(words(options.contenders)), words(options.link or "")
    if not names or (options.link is not None and not links):
        raise BenchError(f"give at least one {'link' if names else 'contender'}")
    try:
        for link in links:
            if link != NO_LIMIT:
                parse_rate(link)
    except ValueError as error:
        raise BenchError(f"--link: {error}") from None
    plan = Plan(
        groups=(tuple(names),),
        ranks=options.ranks,
        model=options.model,
        params=options.params or MODELS[options.model][0],
        density=options.density,
        values=options.values,
        bucket_mb=options.bucket_mb,
        steps=options.steps,
        timeout=options.timeout,
        ranks_per_host=options.ranks_per_host,
        progress=sys.stderr.isatty() and find_spec("tqdm") is not None,
    )
    if options.figure is not None and (problem := drawing_problem(options.figure)):
        raise BenchError(problem)
    if links and (problem := lab_problem()):
        print(f"oktopk bench: no links of {', '.join(links)}: {problem}", file=sys.stderr)
        links = []
    return plan.fitted(free_memory()), links


def _show(options: argparse.Namespace, records: list[Record]) -> int:
    if not records:
        return 0
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    if options.json:
        print(json.dumps({"machine": machine, "records": records}, indent=2))
    else:
        print("\n\n".join(filter(None, [text(records), phases(records)])))
    try:
        if options.figure is not None:
            draw(records, options.figure)
    except OSError as error:
        complain("bench", error)
        return 1
    return 0
