"""The documents: links lead somewhere, and no placeholder is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(document: Path) -> None:
    text = document.read_text()
    assert "@@" not in text
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / target).exists(), target


def test_every_algorithm_is_documented() -> None:
    import oktopk

    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in oktopk.ALGORITHMS:
        assert f"| `{name}` |" in text


def test_each_example_with_a_framework_has_the_import_that_is_shown_and_is_tested() -> None:
    text = (ROOT / "docs" / "integrations.md").read_text()
    tested = (ROOT / "integrations_tests" / "test_frameworks.py").read_text()
    rows = re.findall(
        r"\| `(from oktopk\.integrations\.\w+ import [^`]+)`<br>`.*\]\(\.\./(examples/(\w+)\.py)\)", text
    )
    assert len(rows) == 4
    for line, path, name in rows:
        assert f"\n{line}\n" in (ROOT / path).read_text()
        assert f'    "{name}": Framework(' in tested
