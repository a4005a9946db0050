"""A wheel, installed where the source tree is out of reach: all of it is there, and it works."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.paths import ROOT
from tests.support.wheel import installed
from tests.support.wheel.building import Distributions, add, build, environment

EXTRAS = ("mpi", "train", "report")
SMOKE = installed.__file__
RANKS = "1"
"""Which train; `make wheel-smoke` has two."""
_SECONDS = 300
pytestmark = pytest.mark.timeout(2 * _SECONDS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return build(tmp_path_factory.mktemp("distributions"))


def sources() -> set[str]:
    folder = ROOT / "src"
    found = {str(path.relative_to(folder)) for path in (folder / "oktopk").rglob("*") if path.is_file()}
    return {name for name in found if "__pycache__" not in name}


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Distributions) -> None:
    with ZipFile(built.wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert files == sources()
    assert {"oktopk/py.typed", "oktopk/tools/report/html/page.html", "oktopk/train/configs/demo.toml"} <= files
    assert len(licences) == 1


def test_the_source_distribution_has_them_too(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in sources()} | {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.skipif(find_spec("twine") is None, reason="twine is not installed")
def test_an_index_would_accept_both(built: Distributions) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(built.sdist), str(built.wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def smoke(python: Path, kind: str, folder: Path) -> None:
    folder.mkdir()
    done = subprocess.run(
        [str(python), "-I", "-W", "error", SMOKE, kind, RANKS],
        cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as it must be" in done.stdout


def test_an_installation_works_without_the_source_tree(built: Distributions, tmp_path: Path) -> None:
    """First without extras, then with them."""
    python = environment(tmp_path / "environment", built.wheel)
    smoke(python, "minimal", tmp_path / "minimal")
    add(tmp_path / "environment", built.wheel, EXTRAS)
    smoke(python, "full", tmp_path / "full")
