"""The extras of this package, and what is in them, as its metadata says."""

from __future__ import annotations

import re
from importlib import metadata

EXTRAS = ("mpi", "train", "report")
"""Those whose packages a command may miss."""
_PACKAGES = {"PIL": "pillow"}
"""Of modules that are not called like the package they come with."""


def packages() -> dict[str, list[str]]:
    """By extra."""
    found: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for requirement in metadata.requires("oktopk") or ():
        match = re.fullmatch(r"([\w.-]+)[^;]*;.*\bextra == ['\"](\w+)['\"]", requirement)
        if match and match[2] in found:
            found[match[2]].append(match[1])
    return found


def how_to_install(module: str) -> str:
    """What to type when a module is missing; `tomli`, which only old Pythons need, has a marker of its own.

    >>> how_to_install("PIL.Image"), how_to_install("tomli"), how_to_install("elsewhere")
    ("pip install 'oktopk[train]'", "pip install 'oktopk[train]'", 'pip install elsewhere')
    """
    name = module.partition(".")[0]
    package = _PACKAGES.get(name, name)
    try:
        extra = next((extra for extra, inside in packages().items() if package in inside), None)
    except metadata.PackageNotFoundError:  # a source tree that nobody has installed
        extra = None
    return f"pip install {package}" if extra is None else f"pip install 'oktopk[{extra}]'"
