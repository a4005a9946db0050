"""Show one run or compare several: on a self-contained page, or as JSON.

    oktopk report runs/NAME -o report.html        one run
    oktopk report runs/A runs/B SWEEP -o all.html compare runs, and all runs of a sweep
    oktopk report --live runs/NAME                follow a running job in a browser on this machine, at the
                                                  address it prints: requests without its token are refused

The page begins with answers: when the sparse phase started, the density, the bytes sent compared with dense and
with the bounds of 6k and 2k words, where step time went, and how much communication overlapped with backward.
The page needs the extra `report` (pip install 'oktopk[report]'); --json does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from oktopk.errors import OkTopkError
from oktopk.tools.report import ReportError, build_page, build_report, find_runs, name_runs, read_run, serve
from oktopk.utils.files import write_atomically

from ..errors import print_error

DEFAULT_PAGE = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run or a sweep")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help=f"output file (default: {DEFAULT_PAGE})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of writing a page")
    parser.add_argument(
        "--live",
        action="store_true",
        help="serve the page on 127.0.0.1, at an address with a random token, until Ctrl-C",
    )
    parser.add_argument("--port", type=_port, metavar="N", help="port for --live (default: a free one)")


def run(options: argparse.Namespace) -> int:
    if problem := _find_conflict(options):
        print_error("report", ReportError(problem))
        return 2
    try:
        folders = find_runs(options.runs)
        if options.live:
            serve(folders, options.port or 0, _print_url)
            return 0
        document = build_report(
            [read_run(folder, name) for folder, name in zip(folders, name_runs(folders), strict=True)]
        )
        if options.json:
            print(json.dumps(document, indent=2, allow_nan=False))
            return 0
        target = options.out or DEFAULT_PAGE
        write_atomically(target, build_page(document).encode("utf-8", "replace"))
    except (OkTopkError, OSError) as error:
        print_error("report", error)
        return 1
    for one in document["runs"] if len(document["runs"]) == 1 else []:
        print("\n".join(f"{item['question']} {item['answer']}" for item in one["answers"]))
    print(f"the report is in {target}")
    return 0


def _find_conflict(options: argparse.Namespace) -> str | None:
    chosen = [name for name in ("out", "json", "live") if getattr(options, name)]
    if len(chosen) > 1:
        return f"--{chosen[0]} and --{chosen[1]} cannot be combined: choose a page, JSON, or a live page"
    if options.port is not None and not options.live:
        return "--port needs --live"
    return None


def _print_url(url: str) -> None:
    print(f"the report is at {url} (press Ctrl-C to stop)", flush=True, file=sys.stdout)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is not a port: expected 0 to {2**16 - 1}")
    return value
