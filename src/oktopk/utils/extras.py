"""Optional dependencies: the extras of this package and the packages in them."""

from __future__ import annotations

import re
from importlib import metadata

EXTRAS = ("mpi", "train", "report")
"""Extras that a command may need."""
_PACKAGES = {"PIL": "pillow"}
"""Packages whose name differs from that of their module."""


def packages() -> dict[str, list[str]]:
    """The packages of each extra, from the metadata of this package."""
    found: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for requirement in metadata.requires("oktopk") or ():
        match = re.fullmatch(r"([\w.-]+)[^;]*;.*\bextra == ['\"](\w+)['\"]", requirement)
        if match and match[2] in found:
            found[match[2]].append(match[1])
    return found


def how_to_install(module: str) -> str:
    """The command that installs a missing module.

    >>> how_to_install("PIL.Image"), how_to_install("tomli"), how_to_install("elsewhere")
    ("pip install 'oktopk[train]'", "pip install 'oktopk[train]'", 'pip install elsewhere')
    """
    name = module.partition(".")[0]
    package = _PACKAGES.get(name, name)
    try:
        extra = next((extra for extra, inside in packages().items() if package in inside), None)
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        extra = None
    return f"pip install {package}" if extra is None else f"pip install 'oktopk[{extra}]'"
