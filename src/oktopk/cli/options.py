"""The trainer's options as arguments of a command, each said once in oktopk.train.config.options."""

from __future__ import annotations

import argparse
from typing import Any

from oktopk.train.config.options import OPTIONS, switch
from oktopk.train.config.origins import shipped

_METAVARS = {"int": "N", "float": "X", "str": "NAME", "Path": "PATH", "switch": "True|False"}


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="NAME|FILE", help=f"a TOML file, or one of {', '.join(shipped())}")


def add_option(group: argparse._ArgumentGroup, name: str, more: str = "") -> None:
    """What is not given is not in the namespace: the environment or a configuration may have it."""
    item = OPTIONS[name]
    parse = item.metadata["parse"]
    alone: dict[str, Any] = {"nargs": "?", "const": "True"} if parse is switch else {}
    default = "" if item.default is None else f" (default: {item.default})"
    group.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        default=argparse.SUPPRESS,
        metavar=_METAVARS[parse.__name__],
        help=item.metadata["meaning"] + more + default,
        **alone,
    )


def given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in OPTIONS if hasattr(options, name)}
