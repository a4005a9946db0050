"""Look at a run, or compare several: one page that needs no network, or the same figures as JSON.

    oktopk report runs/NAME -o report.html        one run
    oktopk report runs/A runs/B SWEEP -o all.html several, and all runs of a sweep, compared
    oktopk report --live runs/NAME                follow a run that is going on, in a browser of this machine

The page has answers first: when the sparse phase began, the density, the bytes sent against dense and against the
bounds, where the time of a step went and what was hidden. Drawing needs the extra `report`
(pip install 'oktopk[report]'); --json does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from oktopk.errors import OkTopkError
from oktopk.tools.report import ReportError, find, names, page, read, report, serve
from oktopk.utils.files import write_atomically

from ..complaint import complain

DEFAULT_PAGE = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run, or of a sweep")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help=f"where the page goes (default: {DEFAULT_PAGE})"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of writing a page")
    parser.add_argument("--live", action="store_true", help="serve the page on 127.0.0.1 until Ctrl-C")
    parser.add_argument("--port", type=_port, metavar="N", help="for --live (default: a free one)")


def run(options: argparse.Namespace) -> int:
    if problem := _contradiction(options):
        complain("report", ReportError(problem))
        return 2
    try:
        folders = find(options.runs)
        if options.live:
            serve(folders, options.port or 0, _tell)
            return 0
        document = report([read(folder, name) for folder, name in zip(folders, names(folders), strict=True)])
        if options.json:
            print(json.dumps(document, indent=2, allow_nan=False))
            return 0
        target = options.out or DEFAULT_PAGE
        write_atomically(target, page(document).encode("utf-8", "replace"))
    except (OkTopkError, OSError) as error:
        complain("report", error)
        return 1
    for one in document["runs"] if len(document["runs"]) == 1 else []:
        print("\n".join(f"{said['question']} {said['answer']}" for said in one["answers"]))
    print(f"the report is in {target}")
    return 0


def _contradiction(options: argparse.Namespace) -> str | None:
    chosen = [name for name in ("out", "json", "live") if getattr(options, name)]
    if len(chosen) > 1:
        return f"--{chosen[0]} and --{chosen[1]} exclude each other: a page, JSON, or a live page"
    if options.port is not None and not options.live:
        return "--port is for --live"
    return None


def _tell(url: str) -> None:
    print(f"the report is at {url} (Ctrl-C ends it)", flush=True, file=sys.stdout)


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to {2**16 - 1}")
    return value
