"""docs/troubleshooting.md quotes messages that the library really has."""

from __future__ import annotations

import ast
import re

from oktopk.utils import secret
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def quoted() -> list[str]:
    """The messages: literals in the first column."""
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def texts_of_the_library() -> str:
    """All string constants of the sources; what formatting fills in is a line break."""
    found = []
    for path in (ROOT / "src" / "oktopk").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*[a-z]", "\n", node.value.replace("%%", "%")))
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\n" for part in node.values]
                found.append("".join(map(str, parts)))
    return "\n".join(found)


def test_messages_are_those_of_the_library() -> None:
    known, messages = texts_of_the_library(), quoted()
    assert len(messages) > 30
    names = {secret.SECRET, secret.REQUIRE_SECRET}
    missing = []
    for message in messages:
        text = re.sub("|".join(sorted(names, key=len, reverse=True)), "…", message)
        pieces = [piece.strip(" :;,") for piece in text.split("…")]
        missing += [message for piece in pieces if len(piece) > 3 and piece not in known]
    assert missing == []
