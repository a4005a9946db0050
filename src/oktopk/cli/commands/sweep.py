"""Train with several algorithms, densities and seeds, and compare the runs.

    oktopk sweep --algorithms dense,oktopk,topka --densities 0.01,0.02 --seeds 0,1,2 --out FOLDER --ranks 2 \\
        -- --dnn lstman4-small --max-epochs 20

Options after -- go to every `oktopk train`. Runs are done one after the other; the dense algorithm runs once per
seed. Ctrl-C saves the current run and ends the sweep; the same command resumes it. If a run fails, the sweep
continues with the next one. The table goes to stdout, and to FOLDER as sweep.csv (runs), sweep_means.csv
(means over seeds) and sweep.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from oktopk.errors import OkTopkError
from oktopk.tools import sweep as tool
from oktopk.tools.tables import format_table
from oktopk.train.config.options import OPTIONS, ConfigError, parse
from oktopk.train.config.origins import resolve
from oktopk.train.launch import detect_rank
from oktopk.utils.files import make_folder
from oktopk.utils.locks import FolderLock

from ..errors import print_error
from ..options import collect_options
from ..parser import Parser, add_alias
from ..parsing import split_list
from .train import add_arguments as add_train_arguments

SET_BY_SWEEP = ("out", "compressor", "compression", "density", "seed", "ranks")
"""Options of `oktopk train` that the sweep sets for each run."""
ALIASES = {"--compressor": "algorithms", "--algorithm": "algorithms", "--density": "densities", "--seed": "seeds"}
"""The same options as `oktopk train` calls them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithms", default="dense,oktopk", metavar="A,B,…", help="algorithms (default: dense,oktopk)"
    )
    parser.add_argument(
        "--densities", default="0.01", metavar="D,E,…", help="densities, also auto (default: 0.01)"
    )
    parser.add_argument("--seeds", default="0", metavar="S,T,…", help="seeds (default: 0)")
    for flag, name in ALIASES.items():
        add_alias(parser, flag, name)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="output folder for runs and tables"
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        help="number of ranks of each run, on this machine (default: 1, which sends nothing)",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="options of `oktopk train`, for all runs")


def run(options: argparse.Namespace) -> int:
    try:
        _check(options)
        runs = tool.plan(
            _parse_list("compressor", options.algorithms, "--algorithms"),
            _parse_list("density", options.densities, "--densities"),
            _parse_list("seed", options.seeds, "--seeds"),
        )
        return _sweep(options, runs)
    except (OkTopkError, OSError) as error:
        print_error("sweep", error)
        return 2 if isinstance(error, ConfigError) else 1


def _sweep(options: argparse.Namespace, runs: Sequence[tool.Run]) -> int:
    passed_on = [*(["--ranks", options.ranks] if options.ranks else []), *options.options]
    _check_same(options.out, passed_on)
    make_folder(options.out)
    with closing(FolderLock(options.out)):
        return _sweep_locked(options, runs, passed_on)


def _sweep_locked(options: argparse.Namespace, runs: Sequence[tool.Run], passed_on: list[str]) -> int:
    _check_same(options.out, passed_on)  # again: another sweep may have come and gone since
    log, handler = logging.getLogger(tool.__name__), logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        outcomes, ended_by = tool.run_all(
            runs,
            options.out,
            passed_on,
            on_change=lambda known: tool.write(options.out, tool.report(known, passed_on)),
        )
    finally:
        log.removeHandler(handler)
    report = tool.report(outcomes, passed_on)
    print(json.dumps(report, indent=2) if options.json else text(report))
    if ended_by is not None:
        print(f"{ended_by.name}: run the same command again to resume the sweep in {options.out}", file=sys.stderr)
        return 128 + ended_by
    return int(any(outcome.status != tool.FINISHED for outcome in outcomes))


def _check(options: argparse.Namespace) -> None:
    """Reject bad options once, before the first run."""
    if detect_rank(os.environ).world > 1:
        raise ConfigError("a sweep starts its own ranks: call it with --ranks N, without mpirun, torchrun or srun")
    parser = Parser(prog="oktopk sweep … --", add_help=False)
    add_train_arguments(parser)
    parsed = parser.parse_args(options.options)
    chosen = collect_options(parsed)
    for name in (*SET_BY_SWEEP, "resume", "override", "json"):
        if name in chosen or (name not in OPTIONS and getattr(parsed, name)):
            own = ALIASES.get(f"--{name}")
            instead = f": pass --{own} before --" if own else "; see oktopk sweep --help"
            raise ConfigError(f"--{name} after --: the sweep sets it for each run{instead}")
    resolved = resolve(chosen | ({"ranks": options.ranks} if options.ranks else {}), os.environ, parsed.config)
    if not resolved.config.compression:
        origin = resolved.origins["compression"]
        raise ConfigError(f"--compression is False ({origin}), so all runs would be dense: remove it")


def _check_same(folder: Path, passed_on: Sequence[str]) -> None:
    before = tool.previous_options(folder)
    if before is not None and before != list(passed_on):
        raise ConfigError(
            f"{folder} holds a sweep with other options ({' '.join(before) or 'none'}); its runs cannot be "
            "compared with these: pass the same options, or another --out"
        )


def _parse_list(name: str, text: str, flag: str) -> list[Any]:
    found = split_list(text)
    if not found:
        raise ConfigError(f"{flag} needs at least one value, got {text!r}")
    values = [parse(name, word, flag) for word in found]
    for value in values:
        if name == "density" and ":" in str(value):
            raise ConfigError(f"{flag} takes numbers and auto, got {value}: repeat a run with oktopk train")
    return values


Form = Callable[[Any], str]


def _format_density(density: float | str) -> str:
    return density if isinstance(density, str) else f"{density:g}"


_OF_RUN: dict[str, Form] = {"algorithm": str, "density": _format_density, "seed": str, "status": str, "steps": str}
_OF_SEEDS: dict[str, Form] = {"algorithm": str, "density": _format_density, "seeds": str}
_TITLES = {"sent_bytes": "sent bytes/step", "step_ms": "ms/step"}


def text(report: dict[str, Any]) -> str:
    """Format the runs, the means over seeds, and the failures."""
    rows, groups = report["runs"], report["over_seeds"]
    known = {*_OF_RUN, "run", "problem", "phase", *_TITLES}
    validation = dict.fromkeys(name for one in rows for name in one if name not in known)
    figures: dict[str, Form] = {**dict.fromkeys(validation, "{:.4f}".format), "sent_bytes": "{:,.0f}".format}
    figures["step_ms"] = "{:.1f}".format
    titles = ["phase", *(_TITLES.get(name, name) for name in figures)]
    of_run = _OF_RUN | {"phase": str} | figures
    parts = [
        format_table(
            [*_OF_RUN, *titles], [[_cell(one.get(n), form) for n, form in of_run.items()] for one in rows]
        )
    ]
    if groups:
        of_seeds = _OF_SEEDS | {"phase": str}
        means = [
            [_cell(one[name], form) for name, form in of_seeds.items()]
            + [_spread(one["figures"].get(name), form) for name, form in figures.items()]
            for one in groups
        ]
        parts.append("mean ± standard deviation over seeds\n" + format_table([*_OF_SEEDS, *titles], means))
    if failed := [f"  {one['run']}: {one['problem']}" for one in rows if one["problem"]]:
        parts.append("\n".join(["failed:", *failed]))
    return "\n\n".join(parts)


def _cell(value: Any, form: Form) -> str:
    return "–" if value is None else form(value)


def _spread(figure: dict[str, Any] | None, form: Form) -> str:
    if figure is None:
        return "–"
    return form(figure["mean"]) + ("" if figure["std"] is None else f" ± {form(figure['std'])}")
