"""Show one run or compare several: on a self-contained page, or as JSON.

    oktopk report runs/NAME -o report.html        one run
    oktopk report runs/A runs/B SWEEP -o all.html compare runs, and all runs of a sweep
    oktopk report --live runs/NAME                follow a running job in a browser on this machine, at the
                                                  address it prints: requests without its token are refused
    oktopk report runs/NAME --figure run.pdf --csv tables    the charts as a picture, and their data as CSV files

The page begins with answers: when the sparse phase started, the density, the bytes sent compared with dense and
with the bounds of 6k and 2k words, where step time went, and how much communication overlapped with backward.
The page and the picture need the extra `report`; --json and --csv do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from oktopk.errors import OkTopkError
from oktopk.tools.plotting import figure_problem
from oktopk.tools.report import (
    ReportError,
    build_page,
    build_report,
    draw,
    find_runs,
    name_runs,
    read_run,
    serve,
    write_tables,
)
from oktopk.tools.report.analysis.runs import Run
from oktopk.utils.files import write_atomically

from ..errors import print_error
from ..parsing import parse_whole

DEFAULT_PAGE = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a run or a sweep")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help=f"output file (default: {DEFAULT_PAGE})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of writing a page")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the charts to this .svg, .pdf or .png instead of a page"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FOLDER", help="write the data of each chart as a CSV file instead of a page"
    )
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
        runs = [read_run(folder, name) for folder, name in zip(folders, name_runs(folders), strict=True)]
        document = build_report(runs)
        written = _write(document, options)
        if options.json:
            print(json.dumps(document, indent=2, allow_nan=False))
    except (OkTopkError, OSError) as error:
        print_error("report", error)
        return 1
    for run in runs:
        _print_notes(run, several=len(runs) > 1)
    for one in document["runs"] if len(document["runs"]) == 1 and not options.json else []:
        print("\n".join(f"{item['question']} {item['answer']}" for item in one["answers"]))
    for line in written:
        print(line, file=sys.stderr if options.json else sys.stdout)
    return 0


def _write(document: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Write what was asked for: the page unless it was something else. Returns a line about each."""
    written = []
    if options.out is not None or not (options.json or options.figure or options.csv):
        target = options.out or DEFAULT_PAGE
        write_atomically(target, build_page(document).encode("utf-8", "replace"))
        written.append(f"the report is in {target}")
    if options.figure is not None:
        draw(document, options.figure)
        written.append(f"the figure is in {options.figure}")
    if options.csv is not None:
        written.append(f"{len(write_tables(document, options.csv))} tables are in {options.csv}")
    return written


def _print_notes(run: Run, several: bool) -> None:
    """Say on stderr what is missing or damaged in the folder of a run."""
    for note in run.notes:
        print(f"oktopk report: {f'{run.name}: ' if several else ''}{note}", file=sys.stderr)


def _find_conflict(options: argparse.Namespace) -> str | None:
    chosen = [name for name in ("out", "json", "live") if getattr(options, name)]
    if len(chosen) > 1:
        return f"--{chosen[0]} and --{chosen[1]} cannot be combined: choose a page, JSON, or a live page"
    if options.live and (options.figure or options.csv):
        return f"--live and --{'figure' if options.figure else 'csv'} cannot be combined"
    if options.port is not None and not options.live:
        return "--port needs --live"
    return None if options.figure is None else figure_problem(options.figure)


def _print_url(url: str) -> None:
    print(f"the report is at {url} (press Ctrl-C to stop)", flush=True, file=sys.stdout)


def _port(text: str) -> int:
    value = parse_whole(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to {2**16 - 1}, got {text}")
    return value
