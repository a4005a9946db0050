"""Add the trainer's options to a command; oktopk.train.config.options defines each of them once."""

from __future__ import annotations

import argparse
from typing import Any

from oktopk.tools.model_step import OPTIMIZERS
from oktopk.train.config.kinds import switch
from oktopk.train.config.options import OPTIONS, ConfigError, describe
from oktopk.train.config.origins import shipped_configs

from .parsing import parse_seconds

_METAVARS = {"int": "N", "float": "X", "str": "NAME", "Path": "PATH", "switch": "True|False"}
_METAVARS |= {"int or auto": "N|auto", "float or auto": "X|auto"}


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="NAME|FILE", help=f"TOML file, or one of {', '.join(shipped_configs())}"
    )


def add_option(group: argparse._ArgumentGroup, name: str, more: str = "", default: str | None = None) -> None:
    """Add one option of the trainer; `more` extends its help, `default` replaces the trainer's default in it.

    An option that is not given stays out of the namespace, because the environment or a configuration may set it.
    """
    item = OPTIONS[name]
    parse = item.metadata["parse"]
    alone: dict[str, Any] = {"nargs": "?", "const": "True"} if parse is switch else {}
    shown = item.default if default is None else default
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        default=argparse.SUPPRESS,
        metavar=_METAVARS[parse.__name__],
        help=describe(name) + more + ("" if shown is None else f" (default: {shown})"),
        **alone,
    )


def collect_options(options: argparse.Namespace) -> dict[str, Any]:
    """Collect the trainer's options that the command line has set."""
    return {name: getattr(options, name) for name in OPTIONS if hasattr(options, name)}


def add_model_step(parser: argparse.ArgumentParser) -> None:
    """Add what the time of a step without communication depends on, besides the trainer's options."""
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="with --dnn: time its step with this optimizer (default: the network's own)",
    )
    parser.add_argument(
        "--compute-seconds",
        type=parse_seconds,
        metavar="S",
        help="seconds of your model's step without communication (forward, backward, optimizer), like 0.25 or "
        "250ms, instead of timing --dnn",
    )


def check_model_step(options: argparse.Namespace, has_model: bool) -> None:
    """Refuse combinations in which an option would have no effect."""
    if options.optimizer is None:
        return
    if options.compute_seconds is not None:
        raise ConfigError("--compute-seconds includes the optimizer: remove --optimizer")
    if not has_model:
        raise ConfigError("--optimizer needs a network to time: pass --dnn NAME")
