"""Optional dependencies: the extras of this package, the packages in them, and how to install them."""

from __future__ import annotations

import json
import operator
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

EXTRAS = ("mpi", "train", "report")
"""Extras that a command may need."""
_PACKAGES = {"PIL": "pillow"}
"""Packages whose name differs from that of their module."""
_CLAUSE = re.compile(r"(python_version|sys_platform)\s*(<=|>=|==|!=|<|>)\s*['\"]([^'\"]+)['\"]")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip


def packages() -> dict[str, list[str]]:
    """The packages of each extra that are needed on this Python and system, from the metadata of this package."""
    found: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for requirement in metadata.requires("oktopk") or ():
        match = re.fullmatch(r"([\w.-]+)[^;]*;(.*)\bextra == ['\"](\w+)['\"]", requirement)
        if match and match[3] in found and marker_holds(match[2]):
            found[match[3]].append(match[1])
    return found


def marker_holds(marker: str) -> bool:
    """Whether the conditions of a requirement hold here. What is not understood counts as true.

    >>> marker_holds("python_version < '3.3' and "), marker_holds("sys_platform != 'amiga' and "), marker_holds("")
    (False, True, True)
    """
    if " or " in marker:
        return True
    return all(_clause_holds(*clause) for clause in _CLAUSE.findall(marker))


def _clause_holds(name: str, compare: str, wanted: str) -> bool:
    if name == "sys_platform":
        return _COMPARE[compare](sys.platform, wanted)
    try:
        numbers = tuple(int(part) for part in wanted.split("."))
    except ValueError:  # 3.11.*
        return True
    return _COMPARE[compare](sys.version_info[: len(numbers)], numbers)


def install_command(*extras: str) -> str:
    """The command that installs extras in the way in which oktopk was installed.

    From a checkout that is `pip install -e '.[train]'`, with the folder of the checkout unless one is in it;
    otherwise `pip install 'oktopk[train]'`.
    """
    folder, editable = _source()
    listed = f"[{','.join(extras)}]"
    if folder is None:
        return f"pip install 'oktopk{listed}'"
    place = "." if folder.resolve() == Path.cwd() else str(folder)
    return f"pip install {'-e ' if editable else ''}'{place}{listed}'"


def _source() -> tuple[Path | None, bool]:
    """The checkout that oktopk was installed from, if any, and whether it runs from there."""
    try:
        # A checkout on the path has metadata of its own, which does not say how it was installed.
        texts = [found.read_text("direct_url.json") for found in metadata.distributions(name="oktopk")]
        known = json.loads(next(filter(None, texts), "{}"))
        if "dir_info" not in known:
            return None, False
        folder = Path(unquote(urlparse(known["url"]).path))
        return folder, bool(known["dir_info"].get("editable"))
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None, False


def how_to_install(module: str) -> str:
    """The command that installs a missing module.

    >>> how_to_install("PIL.Image") == how_to_install("tqdm") == install_command("train")
    True
    >>> how_to_install("elsewhere")
    'pip install elsewhere'
    """
    name = module.partition(".")[0]
    package = _PACKAGES.get(name, name)
    try:
        extra = next((extra for extra, inside in packages().items() if package in inside), None)
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        extra = None
    return f"pip install {package}" if extra is None else install_command(extra)
