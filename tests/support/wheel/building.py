"""The wheel as a user gets it, and environments that have it and what it asks for, and nothing else.

`python -m tests.support.wheel.building FOLDER` builds the source distribution and the wheel: `make dist`.

Tests have no network. What an environment needs besides the wheel is linked from the one that runs the tests:
those packages that pip would install, by what their metadata ask for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

SOURCES = ("LICENSE", "README.md", "pyproject.toml", "src")
_SECONDS = 100
_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
_NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Distributions:
    sdist: Path
    wheel: Path


def build(folder: Path) -> Distributions:
    """A source distribution of a copy of the tree, and the wheel that it builds."""
    tree, built = folder / "tree", folder / "dist"
    for name in SOURCES:
        source, copy = ROOT / name, tree / name
        tree.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=_NOT_SOURCES)
        else:
            shutil.copy(source, copy)
    _run([sys.executable, "-c", _BUILD, "build_sdist", str(built)], tree)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _run([sys.executable, "-c", _BUILD, "build_wheel", str(built)], unpacked)
    (wheel,) = built.glob("*.whl")
    return Distributions(sdist, wheel)


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel asks for, with its extras."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return [
        Requirement(line.partition(": ")[2]) for line in text.splitlines() if line.startswith("Requires-Dist:")
    ]


def needed(wanted: Iterable[Requirement], extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The packages that pip would install, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(one, frozenset(extras)) for one in wanted]
    seen = set()
    while waiting:
        one, chosen = waiting.pop()
        if one.marker is not None and not any(one.marker.evaluate({"extra": e}) for e in chosen or {""}):
            continue
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key not in seen:
            seen.add(key)
            found[key[0]] = distribution = metadata.distribution(one.name)
            waiting += [(Requirement(line), key[1]) for line in distribution.requires or ()]
    return found


def environment(folder: Path, wheel: Path) -> Path:
    """The Python of a new virtual environment with the wheel and what it asks for."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    add(folder, wheel, ())
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    _run([*pip, "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)], folder)
    _take_kernels(_site(folder))
    return python


def add(folder: Path, wheel: Path, extras: Iterable[str]) -> None:
    """What the wheel asks for with these extras."""
    for distribution in needed(requirements(wheel), extras).values():
        _link(distribution, folder, _site(folder))


def _site(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def _take_kernels(site: Path) -> None:
    """Those that Numba has compiled for the source tree. It knows a source by its time and size."""
    home = ROOT / "src"
    for source in (home / "oktopk" / "kernels").rglob("*.py"):
        time = source.stat().st_mtime_ns
        os.utime(site / source.relative_to(home), ns=(time, time))
    for kept in (home / "oktopk" / "kernels").rglob("*.nb*"):
        copy = site / kept.relative_to(home)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(kept, copy)


def _link(distribution: metadata.Distribution, folder: Path, site: Path) -> None:
    home = Path(distribution.locate_file(""))
    for file in distribution.files or ():
        if ".." in file.parts:  # a program or a library, outside of site-packages
            source = Path(distribution.locate_file(file)).resolve()
            target = folder / source.relative_to(Path(sys.prefix).resolve())
        else:
            source, target = home / file.parts[0], site / file.parts[0]
        if source.exists() and not target.exists() and file.parts[0] != "__pycache__":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="oktopk-dist-") as name:
        distributions = build(Path(name))
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        for file in (distributions.sdist, distributions.wheel):
            print(shutil.copy(file, Path(sys.argv[1]) / file.name))
