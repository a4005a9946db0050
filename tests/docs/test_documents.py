"""The documents: links lead somewhere, and no placeholder is left. `make docs` checks those of the site again."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.paths import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
SLUG = re.compile(r"[^\w\- ]")


def links(document: Path) -> list[str]:
    """Targets, outside of code."""
    text = re.sub(r"^(```+).*?^\1$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))


def anchors(page: Path) -> set[str]:
    """What GitHub and the site make of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {SLUG.sub("", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_relative_links_resolve(document: Path) -> None:
    assert "@@" not in document.read_text(encoding="utf-8")
    for target in links(document):
        if ":" in target:
            continue
        name, _, anchor = target.partition("#")
        page = document.parent / name if name else document
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_other_links_have_the_form_of_a_url(document: Path) -> None:
    for target in links(document):
        if ":" in target:
            url = urlsplit(target)
            assert url.scheme == "https", target
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", url.netloc), target


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
