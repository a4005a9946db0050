"""Results in a file of JSON lines, as they come: a run that was interrupted goes on with the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kept_lines(path: Path | None) -> list[dict[str, Any]]:
    """What an earlier run has left there. Half a line at the end is removed."""
    if path is None:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text or not path.exists():
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def keep_line(path: Path | None, entry: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
