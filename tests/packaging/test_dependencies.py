"""What the package asks for is what it imports, no more and no less: in the library, or in the extra of a part."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIBRARY = "the library"
INTEGRATIONS = ("accelerate", "huggingface", "lightning", "mlflow", "ray", "wandb")
PLACES = {  # the first that fits
    "comm/mpi.py": "mpi",
    "tools/doctor/mpi.py": "mpi",
    "kernels/cuda": "cuda",
    "metrics/sinks/tensorboard.py": "train",
    **{f"integrations/{name}.py": name for name in INTEGRATIONS},
    "train/": "train",
    "cli/commands/data.py": "train",
    "tools/": "report",
    "": LIBRARY,
}
"""Where a package of an extra may be imported."""
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "llvmlite": "numba", "mlflow": "mlflow-skinny"}
"""Of modules with another name; numba's own has no version that fits but the one numba brings."""
NOT_IMPORTED = {"mpi": {"mpich"}, "huggingface": {"accelerate"}, "mlflow": {"alembic", "sqlalchemy"}}
"""What packages of an extra need: MPI itself, the Trainer of transformers, local databases of MLflow."""


def asked_for() -> dict[str, set[str]]:
    """Packages by extra."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {LIBRARY: project["dependencies"]} | project["optional-dependencies"]
    return {group: {canonicalize_name(Requirement(one).name) for one in every} for group, every in groups.items()}


def modules(path: Path) -> Iterator[str]:
    """All that a file imports, also inside functions and by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from (word.value for word in node.args[:1] if isinstance(word, ast.Constant))


def packages(path: Path) -> set[str]:
    """Those of other people."""
    roots = {name.partition(".")[0] for name in modules(path) if not name.startswith(".")}
    others = roots - {"oktopk", "common"} - sys.stdlib_module_names
    return {canonicalize_name(PACKAGES.get(name, name)) for name in others}


def imported() -> dict[str, set[str]]:
    """By where it is imported: the library, or the extra of that part."""
    found: dict[str, set[str]] = {place: set() for place in PLACES.values()}
    home = ROOT / "src" / "oktopk"
    for path in home.rglob("*.py"):
        name = path.relative_to(home).as_posix()
        found[next(place for start, place in PLACES.items() if name.startswith(start))] |= packages(path)
    return found


ASKED, IMPORTED = asked_for(), imported()
extras = pytest.mark.parametrize("extra", sorted(set(PLACES.values()) - {LIBRARY}))


def test_the_library_asks_for_what_it_imports() -> None:
    assert IMPORTED[LIBRARY] == ASKED[LIBRARY]


@extras
def test_an_extra_has_what_its_part_imports_beyond_the_library(extra: str) -> None:
    assert IMPORTED[extra] - ASKED[LIBRARY] == ASKED[extra] - NOT_IMPORTED.get(extra, set())


def test_the_extra_of_integrations_has_all_of_theirs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (own,) = project["optional-dependencies"]["integrations"]
    assert (Requirement(own).name, Requirement(own).extras) == (project["name"], set(INTEGRATIONS))


def test_the_extras_of_the_examples_have_what_they_import() -> None:
    used = {name for path in (ROOT / "examples").glob("*.py") for name in packages(path)} - ASKED[LIBRARY]
    frameworks = set().union(*(ASKED[extra] for extra in INTEGRATIONS))
    assert ASKED["examples"] <= used <= ASKED["examples"] | frameworks
