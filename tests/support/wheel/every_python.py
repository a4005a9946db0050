"""The wheel in empty environments, with what pip fetches for it, for every Python from 3.10 to 3.13 that is here.

Unlike the tests it needs the network and takes minutes: `make wheel-smoke`. First the library alone is installed,
then all extras that its commands use; what is installed is tried by installed.py. The exit code is 1 if it fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from oktopk.tools.tables import format_table
from tests.support.paths import ROOT
from tests.support.wheel.building import build

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
KINDS = {"minimal": "", "full": "[mpi,train,report]"}
SMOKE = Path(__file__).with_name("installed.py")
RANKS = "2"
_SECONDS = 1800


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def works(python: str, version: str) -> bool:
    """A name on the path may lead to nothing."""
    tell = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(tell, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() == version


def places(version: str) -> Iterator[str]:
    """On the path, or where pyenv has it: its shims lead to nothing unless they are switched on."""
    if place := shutil.which(f"python{version}"):
        yield place
    if pyenv := shutil.which("pyenv"):
        done = subprocess.run([pyenv, "prefix", version], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            yield str(Path(done.stdout.strip(), "bin", "python"))


def found() -> dict[str, str]:
    """The first Python of each version that works."""
    here = {
        version: next((place for place in places(version) if works(place, version)), None) for version in VERSIONS
    }
    return {version: place for version, place in here.items() if place}


def smoke(python: str, wheel: Path) -> list[list[object]]:
    """A row for each kind of installation."""
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="oktopk-wheel-") as name:
        folder = Path(name)
        run([python, "-m", "venv", str(folder / "environment")], folder)
        own = str(folder / "environment" / "bin" / "python")
        for kind, extras in KINDS.items():
            start = time.perf_counter()
            constraints = str(ROOT / "constraints.txt")
            run([own, "-I", "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}{extras}"], folder)
            installed = time.perf_counter()
            elsewhere = folder / kind
            elsewhere.mkdir()
            run([own, "-I", "-W", "error", str(SMOKE), kind, RANKS], elsewhere)
            tried = time.perf_counter()
            packages = json.loads(run([own, "-I", "-m", "pip", "list", "--format", "json"], folder))
            rows.append([kind, len(packages), f"{installed - start:.0f}", f"{tried - installed:.0f}"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help="like 3.12; default: all")
    wanted, here, rows, failed = parser.parse_args().versions, found(), [], []
    with tempfile.TemporaryDirectory(prefix="oktopk-wheel-") as folder:
        wheel = build(Path(folder)).wheel
        for version in (version for version in wanted if version in here):
            try:
                rows += [[version, *row] for row in smoke(here[version], wheel)]
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(version)
                print(f"Python {version}: {error}", file=sys.stderr)
    print(format_table(["Python", "installation", "packages", "seconds to install", "seconds to try"], rows))
    for version in (version for version in wanted if version not in here):
        print(f"Python {version} is not on this machine: not run")
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
