"""A release has one version, in every file that names it, and says for which Pythons it is."""

from __future__ import annotations

import re
import sys
from typing import Any

import oktopk
from tests.support.paths import ROOT
from tests.support.wheel.every_python import VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def first(pattern: str, name: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{name} has no {pattern}"
    return found[1]


def test_the_version_has_one_source() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "oktopk.__version__"}
    assert first(r'^__version__ = "(.*)"$', "src/oktopk/__init__.py") == oktopk.__version__


def test_changelog_and_citation_name_that_version() -> None:
    assert first(r"^## (\S+)$", "CHANGELOG.md") == oktopk.__version__
    assert first(r"^version: (\S+)$", "CITATION.cff") == oktopk.__version__


def test_classifiers_name_the_pythons_that_the_wheel_is_tried_on() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert tuple(named) == VERSIONS
    assert PROJECT["project"]["requires-python"] == f">={VERSIONS[0]}"


def test_a_public_address_is_named_everywhere_or_nowhere() -> None:
    """The list is that of docs/release.md."""
    urls: dict[str, str] = PROJECT["project"]["urls"]
    home = urls.get("Homepage")
    citation = re.search(r"^repository-code: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert (citation and citation[1]) == home
    security = " ".join((ROOT / "SECURITY.md").read_text("utf-8").split())
    assert ("has no public address yet" in security) == (home is None)
    assert home is None or home in security
    own = {"Documentation", "Changelog", "Issues"}
    assert own & urls.keys() == (own if home else set())
    assert all(urls[name].startswith("https://") for name in urls)
