"""Time every algorithm and PyTorch's own gradient averaging on the same gradients.

The table shows step time, CPU time, bytes sent, also against a dense ring, and how much of the exchange is hidden
(ran during backward) and exposed (the step waited for it after backward).

    oktopk bench --ranks 2                                         processes on this machine, no rate limit
    oktopk bench --ranks 4 --link none,1gbit,100mbit               hosts in network namespaces
    oktopk bench --link 1gbit --model transformer --bucket-mb 1    a real backward pass
    oktopk bench --contenders ddp,powersgd,oktopk --figure bench.png
    oktopk bench --contenders ddp,oktopk,oktopk:fp16,oktopk:auto   variants of one algorithm
    oktopk bench --link 100mbit --contenders ddp,oktopk:density=auto:budget=0.2
    oktopk bench --link 1gbit --ranks-per-host 2 --contenders ddp,oktopk,oktopk:hosts

A step is the backward pass and its gradient exchange; forward and optimizer are not timed. Contenders alternate
step by step, so that a disturbance of the machine affects all of them. Ctrl-C ends all processes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.voice.speaking import COMPILING
from oktopk.errors import OkTopkError
from oktopk.kernels import must_compile
from oktopk.tools.bench.launch import NO_LIMIT, measure
from oktopk.tools.bench.names import (
    BenchError,
    add_link_limits,
    list_contenders,
    list_variants,
    parse_contender,
)
from oktopk.tools.bench.plan import Plan, free_memory
from oktopk.tools.bench.plot import draw
from oktopk.tools.bench.records import Record
from oktopk.tools.bench.tables import phases, text
from oktopk.tools.bench.workloads import MODELS
from oktopk.tools.lab import MAX_HOSTS, enter_user_namespace, lab_problem, parse_rate
from oktopk.tools.plotting import figure_problem
from oktopk.utils.schemas import add_schema
from oktopk.utils.signals import interrupted_code
from oktopk.wire.codecs import VALUE_CODES

from ..errors import print_error
from ..parsing import parse_count, parse_number, parse_whole, split_list

NO_LINK = "loopback: no rate limit, and no interface that counts bytes; --link 1gbit limits the links"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    every = ", ".join(list_contenders(ALGORITHMS.names()))
    sizes = ", ".join(f"{name} {size / 1e6:.4g}M" for name, (size, _) in MODELS.items())
    parser.add_argument("--ranks", type=parse_whole, default=4, metavar="N", help="number of ranks (default: 4)")
    parser.add_argument(
        "--ranks-per-host",
        type=parse_whole,
        default=1,
        metavar="N",
        help="ranks on each host, which share its link (default: 1)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE,…",
        help="run in network namespaces with links of these rates, like none,1gbit,100mbit; needs root or user "
        "namespaces (default: processes on loopback)",
    )
    parser.add_argument(
        "--model",
        default="resnet50-shapes",
        choices=MODELS,
        help="gradients: prepared (resnet50-shapes, synthetic, pooled for large models) or computed (mlp, "
        "transformer) (default: resnet50-shapes)",
    )
    parser.add_argument(
        "--params", type=parse_count, metavar="N", help=f"number of parameters, like 25M (default: {sizes})"
    )
    parser.add_argument(
        "--contenders",
        metavar="A,B,…",
        help=f"what to compare (default: all): {every}. Colons add variants "
        f"to an algorithm, like oktopk:fp16:fused: {', '.join(list_variants())}. fused: all buckets share their "
        f"messages; apart: each bucket sends its own; auto: dense where that is faster; hosts: hierarchical, one "
        "rank of each host exchanges; key=value: a setting of its own, like density=auto:budget=0.2. Lower "
        "bounds: backward (no exchange), limit-memory (one pass over memory), limit-link (the bytes alone)",
    )
    parser.add_argument("--steps", type=parse_whole, default=15, metavar="N", help="timed steps (default: 15)")
    parser.add_argument(
        "--density", type=parse_number, default=0.01, metavar="X",
        help="fraction of entries to send (default: 0.01)",
    )  # fmt: skip
    formats = ", ".join(VALUE_CODES.names())
    parser.add_argument(
        "--values", default="fp32", metavar="NAME", help=f"values on the wire: {formats} (default: fp32)"
    )
    parser.add_argument(
        "--bucket-mb", type=parse_number, metavar="X", help="bucket size of DDP in MB (default: DDP's own)"
    )
    parser.add_argument(
        "--timeout",
        type=parse_number,
        default=1800.0,
        metavar="SECONDS",
        help="time limit for each link (default: 1800)",
    )
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="plot the step times to this .png, .svg or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> int:
    records: list[Record] = []
    code = 0
    try:
        plan, links = _plan(options)
        if not links:
            print(NO_LINK, file=sys.stderr)
        if plan.ranks == 1:
            print("one rank: there is nothing to exchange, only the work of compression is timed", file=sys.stderr)
        if must_compile() and any(parse_contender(name) for name in plan.names):
            print(f"{COMPILING}; not timed", file=sys.stderr)
        for found in measure(plan, links):
            records += found
    except (OkTopkError, OSError) as error:
        print_error("bench", error)
        code = 2 if isinstance(error, BenchError) else 1
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        code = interrupted_code(error)
    return _show(options, records) or code  # after an error, show the links measured before it


def _plan(options: argparse.Namespace) -> tuple[Plan, list[str]]:
    """Make the plan and the list of links; reject bad options before anything is measured."""
    asked = list_contenders() if options.contenders is None else split_list(options.contenders)
    names, links = add_link_limits(asked), split_list(options.link or "")
    if not names or (options.link is not None and not links):
        raise BenchError(f"pass at least one {'link' if names else 'contender'}")
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
    if options.figure is not None and (problem := figure_problem(options.figure)):
        raise BenchError(problem)
    hosts = plan.ranks // plan.ranks_per_host
    if links and hosts > MAX_HOSTS:
        raise BenchError(f"--link makes a network of at most {MAX_HOSTS} hosts, and --ranks asks for {hosts}")
    if links:
        enter_user_namespace()
    if links and (problem := lab_problem()):
        print(f"oktopk bench: no rate limit of {', '.join(links)}: {problem}", file=sys.stderr)
        links = []
    return plan.fit_to_memory(free_memory()), links


def _show(options: argparse.Namespace, records: list[Record]) -> int:
    if not records:
        return 0
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    if options.json:
        print(json.dumps(add_schema("bench", {"machine": machine, "records": records}), indent=2))
    else:
        print("\n\n".join(filter(None, [text(records), phases(records)])))
    try:
        if options.figure is not None:
            draw(records, options.figure)
    except OSError as error:
        print_error("bench", error)
        return 1
    return 0
