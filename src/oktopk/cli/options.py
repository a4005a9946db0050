"""Add the trainer's options to a command; oktopk.train.config.options defines each of them once."""

from __future__ import annotations

import argparse
from typing import Any

from oktopk.train.config.options import OPTIONS, switch
from oktopk.train.config.origins import shipped_configs

_METAVARS = {"int": "N", "float": "X", "str": "NAME", "Path": "PATH", "switch": "True|False"}


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="NAME|FILE", help=f"TOML file, or one of {', '.join(shipped_configs())}"
    )


def add_option(group: argparse._ArgumentGroup, name: str, more: str = "") -> None:
    """Add one option of the trainer; `more` extends its help.

    An option that is not given stays out of the namespace, because the environment or a configuration may set it.
    """
    item = OPTIONS[name]
    parse = item.metadata["parse"]
    alone: dict[str, Any] = {"nargs": "?", "const": "True"} if parse is switch else {}
    default = "" if item.default is None else f" (default: {item.default})"
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        default=argparse.SUPPRESS,
        metavar=_METAVARS[parse.__name__],
        help=item.metadata["help"] + more + default,
        **alone,
    )


def collect_options(options: argparse.Namespace) -> dict[str, Any]:
    """Collect the trainer's options that the command line has set."""
    return {name: getattr(options, name) for name in OPTIONS if hasattr(options, name)}
