"""Train by several algorithms, at several densities, from several seeds, and compare.

    oktopk sweep --algorithms dense,oktopk,topka --densities 0.01,0.02 --seeds 0,1,2 --out FOLDER --ranks 2 \\
        -- --dnn lstman4-small --max-epochs 20

What follows -- goes to every `oktopk train`. Runs come one after the other, dense once for each seed. Ctrl-C ends
the sweep, and the present run saves itself; the same command goes on. A run that fails is noted, and the next
begins. The table is on stdout, and in FOLDER as sweep.csv and sweep.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oktopk.errors import OkTopkError
from oktopk.tools import sweep as tool
from oktopk.tools.tables import table
from oktopk.train.config.options import OPTIONS, ConfigError, parse
from oktopk.train.config.origins import resolve
from oktopk.train.launch import find_place

from ..complaint import complain
from ..lists import words
from ..options import given
from .train import add_arguments as add_train_arguments

OURS = ("out", "compressor", "compression", "density", "seed", "ranks")
"""Options of train that the sweep sets."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithms", default="dense,oktopk", metavar="A,B,…", help="(default: dense,oktopk)")
    parser.add_argument("--densities", default="0.01", metavar="D,E,…", help="(default: 0.01)")
    parser.add_argument("--seeds", default="0", metavar="S,T,…", help="(default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the runs and the tables")
    parser.add_argument("--ranks", metavar="N", help="ranks of each run, on this machine")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="options of oktopk train, for all runs")


def run(options: argparse.Namespace) -> int:
    try:
        _check(options)
        runs = tool.plan(
            _list("compressor", options.algorithms),
            _list("density", options.densities),
            _list("seed", options.seeds),
        )
        return _sweep(options, runs)
    except (OkTopkError, OSError) as error:
        complain("sweep", error)
        return 2 if isinstance(error, ConfigError) else 1


def _sweep(options: argparse.Namespace, runs: Sequence[tool.Run]) -> int:
    passed_on = [*(["--ranks", options.ranks] if options.ranks else []), *options.options]
    _check_same(options.out, passed_on)
    log, handler = logging.getLogger(tool.__name__), logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        outcomes, ended_by = tool.do_all(
            runs, options.out, passed_on, note=lambda known: tool.write(options.out, tool.report(known, passed_on))
        )
    finally:
        log.removeHandler(handler)
    report = tool.report(outcomes, passed_on)
    print(json.dumps(report, indent=2) if options.json else text(report))
    if ended_by is not None:
        print(f"{ended_by.name}: the same command goes on with the sweep in {options.out}", file=sys.stderr)
        return 128 + ended_by
    return int(any(outcome.status != tool.FINISHED for outcome in outcomes))


def _check(options: argparse.Namespace) -> None:
    """What is wrong with the options of all runs is said once, before the first."""
    if find_place(os.environ).world > 1:
        raise ConfigError(
            "a sweep starts its ranks itself: call it without mpirun, torchrun or srun, with --ranks N"
        )
    parser = argparse.ArgumentParser(prog="oktopk sweep … --", allow_abbrev=False, add_help=False)
    add_train_arguments(parser)
    said = parser.parse_args(options.options)
    chosen = given(said)
    for name in (*OURS, "resume", "json"):
        if name in chosen or (name not in OPTIONS and getattr(said, name)):
            raise ConfigError(f"--{name} after --: the sweep sets it for each run; see oktopk sweep --help")
    resolved = resolve(chosen | ({"ranks": options.ranks} if options.ranks else {}), os.environ, said.config)
    if not resolved.config.compression:
        origin = resolved.origins["compression"]
        raise ConfigError(f"compression is False ({origin}), and all runs would be dense: take it out")


def _check_same(folder: Path, passed_on: Sequence[str]) -> None:
    before = tool.options_before(folder)
    if before is not None and before != list(passed_on):
        raise ConfigError(
            f"{folder} holds a sweep with other options ({' '.join(before) or 'none'}), whose runs cannot be "
            "compared with these: give the same options, or another --out"
        )


def _list(name: str, text: str) -> list[Any]:
    found = words(text)
    if not found:
        raise ConfigError(f"give at least one {name}, got {text!r}")
    return [parse(name, word, "command line") for word in found]


Form = Callable[[Any], str]
_OF_RUN: dict[str, Form] = {"algorithm": str, "density": "{:g}".format, "seed": str, "status": str, "steps": str}
_OF_SEEDS: dict[str, Form] = {"algorithm": str, "density": "{:g}".format, "seeds": str}
_TITLES = {"sent_bytes": "sent bytes/step", "step_ms": "ms/step"}


def text(report: dict[str, Any]) -> str:
    """The runs, below them the means over seeds, and what has failed."""
    rows, groups = report["runs"], report["over_seeds"]
    known = {*_OF_RUN, "run", "problem", "phase", *_TITLES}
    validation = dict.fromkeys(name for one in rows for name in one if name not in known)
    figures: dict[str, Form] = {**dict.fromkeys(validation, "{:.4f}".format), "sent_bytes": "{:,.0f}".format}
    figures["step_ms"] = "{:.1f}".format
    titles = ["phase", *(_TITLES.get(name, name) for name in figures)]
    of_run = _OF_RUN | {"phase": str} | figures
    parts = [table([*_OF_RUN, *titles], [[_cell(one.get(n), form) for n, form in of_run.items()] for one in rows])]
    if groups:
        of_seeds = _OF_SEEDS | {"phase": str}
        means = [
            [_cell(one[name], form) for name, form in of_seeds.items()]
            + [_spread(one["figures"].get(name), form) for name, form in figures.items()]
            for one in groups
        ]
        parts.append("mean ± standard deviation over seeds\n" + table([*_OF_SEEDS, *titles], means))
    if failed := [f"  {one['run']}: {one['problem']}" for one in rows if one["problem"]]:
        parts.append("\n".join(["failed:", *failed]))
    return "\n\n".join(parts)


def _cell(value: Any, form: Form) -> str:
    return "–" if value is None else form(value)


def _spread(figure: dict[str, Any] | None, form: Form) -> str:
    if figure is None:
        return "–"
    return form(figure["mean"]) + ("" if figure["std"] is None else f" ± {form(figure['std'])}")
