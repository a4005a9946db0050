"""Values of files that nobody vouches for: what is no number, no text or no JSON is noted and left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from oktopk.utils.files import open_regular

LONGEST_TEXT = 400
"""Characters of a name or a list of culprits; what is longer is cut."""
LARGEST_TEXT_FILE = 2**18
LONGEST_LINE = 2**22
"""Bytes of a line of JSON; a step with thousands of buckets has less."""
LARGEST_NUMBER = 1e60
"""Nothing that is measured is larger, and sums of many such still are numbers."""
_TOO_LONG = b"too long"
_SIZE_BINS = range(64)
_OF_NUMBERS = ("reduction", "step", "train", "validation")
_NO_NUMBERS = frozenset({"event", "phase", "algorithm", "culprits", "skipped", "exact", "slowest_rank", "traffic"})
"""Lines whose columns are numbers, but for these; no rank need be the slowest."""
_MOVED = ("sent_bytes", "sent_messages", "seconds")
_MOST_NAMES = 5

Row = Mapping[str, Any]


def number(value: object) -> float | None:
    """
    >>> [number(value) for value in (3, 0.5, True, "7", float("nan"), 10**400, None)]
    [3.0, 0.5, None, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -LARGEST_NUMBER <= value <= LARGEST_NUMBER else None


def numbers(row: Row) -> dict[str, float]:
    """The columns of a row that hold a number."""
    found = ((name, number(value)) for name, value in row.items())
    return {text(name): value for name, value in found if value is not None}


def amount(row: Row, name: str) -> float:
    """A count, of bytes for one: 0 where there is none."""
    return max(0.0, number(row.get(name)) or 0.0)


def whole(row: Row, name: str) -> int | None:
    """A number that counts from 0."""
    value = row.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def text(value: object) -> str:
    """
    >>> text(None), text("a\\nb"), len(text("x" * 1000))
    ('', 'a b', 400)
    """
    if not isinstance(value, str):
        return ""
    plain = "".join(sign if sign.isprintable() else " " for sign in value[: LONGEST_TEXT + 1])
    return plain if len(plain) <= LONGEST_TEXT else plain[: LONGEST_TEXT - 1] + "…"


def sizes(value: object) -> dict[int, int]:
    """Messages by the power of two of their size, as flat_traffic writes them."""
    if not isinstance(value, Mapping):
        return {}
    bins = {power: whole(value, str(power)) for power in _SIZE_BINS}
    return {power: count for power, count in bins.items() if count}


def is_own(path: Path) -> bool:
    """A file of its folder. Not a pipe, which might never end, nor a link to a file elsewhere: what is in it would
    be in a page that is shown to others."""
    try:
        return path.is_file() and path.resolve().parent.is_relative_to(path.parent.resolve())
    except OSError:  # links in a circle
        return False


def text_file(path: Path, notes: list[str]) -> str:
    """What the file says, or nothing and a note."""
    if not is_own(path):
        notes.append(f"There is no {path.name}.")
        return ""
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_TEXT_FILE + 1)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return ""
    if len(content) > LARGEST_TEXT_FILE:
        notes.append(f"{path.name} is larger than {LARGEST_TEXT_FILE // 1024} KiB: the rest of it is left out.")
    return content[:LARGEST_TEXT_FILE].decode("utf-8", "replace")


def json_file(path: Path, notes: list[str]) -> Row:
    content = text_file(path, notes)
    row = _parsed(content.encode()) if content else {}
    if row is None:
        notes.append(f"{path.name} is not a JSON object and was left out.")
    return row or {}


def rows(path: Path, notes: list[str]) -> Iterator[Row]:
    """The lines of a JSONL file that are objects. The last one may be only half written yet."""
    if not is_own(path):
        notes.append(f"There is no {path.name}: nothing is known of single steps.")
        return
    bad: list[int] = []
    dropped: Counter[str] = Counter()
    try:
        with open_regular(path) as file:
            for place, line in enumerate(_lines(file), start=1):
                row = _parsed(line)
                if row is not None:
                    dropped.update(_without_number(row))
                    yield row
                elif not line.endswith(b"\n"):
                    notes.append(
                        f"The last line of {path.name} is not whole: the run is writing it, or was ended."
                    )
                elif line.strip():
                    bad.append(place)
    except OSError as error:
        notes.append(f"{path.name} cannot be read to its end: {error.strerror}.")
    if bad:
        notes.append(
            f"{len(bad)} lines of {path.name} are no JSON objects and were left out, line {bad[0]} first."
        )
    if dropped:
        notes.append(_what_was_dropped(dropped, path.name))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """A line that is too long comes as one that is no JSON."""
    while line := file.readline(LONGEST_LINE):
        shown = line
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)
            shown = _TOO_LONG + line[-1:]
        yield shown


def _without_number(row: Row) -> Iterator[str]:
    """The columns of a line that should have a number and do not: what is not finite is written as null."""
    if row.get("event") in _OF_NUMBERS:
        yield from (text(name) for name in row if name not in _NO_NUMBERS and number(row[name]) is None)
    traffic, sent = row.get("traffic"), row.get("sent_bytes")
    for part in traffic if isinstance(traffic, list) else ():
        if isinstance(part, dict):
            yield from (name for name in _MOVED if name in part and number(part[name]) is None)
    for ranks in sent.values() if isinstance(sent, dict) else ():
        if isinstance(ranks, list):
            yield from ("sent_bytes" for value in ranks if number(value) is None)


def _what_was_dropped(dropped: Counter[str], name: str) -> str:
    """
    >>> _what_was_dropped(Counter({"loss": 3, "threshold": 1}), "metrics.jsonl")
    'Values in metrics.jsonl that are no numbers or not finite were left out: loss (3), threshold (1).'
    """
    shown = [f"{column} ({count:,})" for column, count in dropped.most_common(_MOST_NAMES)]
    more = ["…"] if len(dropped) > _MOST_NAMES else []
    return f"Values in {name} that are no numbers or not finite were left out: {', '.join([*shown, *more])}."


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
