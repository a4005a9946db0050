"""The code blocks of the documents, and what the comments above them say.

A block is fenced and names its language. A comment directly above it may say:

    <!-- not run: needs two hosts -->    the block cannot run here, and why
    <!-- run -->                         these commands are run, not only parsed
    <!-- file: train.py -->              the block is a program of that name, which a command of the page runs
    <!-- output -->                      the text is what the command above it prints, but for its numbers
    <!-- setup                           lines that stand before the block and are of no use to a reader
    loss = model(x).sum()
    -->

At each heading a reader begins with a new model; what the page has defined stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

LANGUAGES = "python", "sh", "text", "json", "toml"
ELSEWHERE = {
    "docs/plugins.md": "tests/docs/test_plugins.py",
}
"""Pages whose blocks another test runs."""
_FENCE = re.compile(r"(`{3,}|:{3,})(\S*)( .*)?")
_COMMENT = re.compile(r"<!-- (not run|run|file|output|setup)(?:: (.*?))?(?: -->|\n(.*?)\n-->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    section: int
    """The headings of the page before it."""
    language: str
    text: str
    mark: str = ""
    """not run, run, file or output."""
    detail: str = ""
    """The reason, or the name of the file."""
    setup: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def documents() -> list[Path]:
    """Pages of the site with code, and those in the root of the repository."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def all_blocks() -> list[Block]:
    return [block for path in documents() for block in read(path)]


def read(path: Path) -> Iterator[Block]:
    """Blocks of one document; directives of the site, in braces, are none."""
    lines, section, above = path.read_text(encoding="utf-8").split("\n"), 0, 0
    at = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at].strip()) if lines[at].lstrip().startswith(("```", ":::")) else None
        section += lines[at].startswith("#")
        if fence is None:
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[1])
        if not fence[2].startswith("{"):
            marks = _marks("\n".join(lines[above:at]))
            body = "\n".join(lines[at + 1 : end]) + "\n"
            yield Block(path.relative_to(ROOT).as_posix(), at + 1, section, fence[2], body, **marks)
        at = above = end + 1


def _marks(text: str) -> dict[str, str]:
    """The comments at the end of a text."""
    found: dict[str, str] = {}
    while match := re.search(r"(<!-- (?:(?!-->).)*-->)\s*\Z", text, re.DOTALL):
        comment = _COMMENT.fullmatch(match[1])
        if comment is None:
            break
        if comment[1] == "setup":
            found["setup"] = comment[3] or comment[2]
        else:
            found |= {"mark": comment[1], "detail": comment[2] or ""}
        text = text[: match.start()]
    return found
