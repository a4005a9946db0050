"""Parse untrusted run files: values that are not numbers, text or JSON are noted and left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from oktopk.utils.files import open_regular

LONGEST_TEXT = 400
"""Longest name or list of parameters, in characters; longer ones are cut."""
LARGEST_TEXT_FILE = 2**18
LONGEST_LINE = 2**22
"""Longest line of JSON, in bytes; a step with thousands of buckets has less."""
LARGEST_NUMBER = 1e60
"""Larger than any measurement, and small enough that sums stay finite."""
_TOO_LONG = b"too long"
_SIZE_BINS = range(64)
_OF_NUMBERS = ("reduction", "step", "train", "validation")
_NO_NUMBERS = frozenset({"event", "phase", "algorithm", "culprits", "skipped", "exact", "slowest_rank", "traffic"})
"""Kinds of lines whose columns are numbers, and their exceptions; slowest_rank may be null."""
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
    """The numeric columns of a row."""
    found = ((name, number(value)) for name, value in row.items())
    return {text(name): value for name, value in found if value is not None}


def amount(row: Row, name: str) -> float:
    """A non-negative amount, such as bytes; 0 if it is missing."""
    return max(0.0, number(row.get(name)) or 0.0)


def whole(row: Row, name: str) -> int | None:
    """A non-negative integer, or None."""
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
    """Parse message counts by power of two, as flat_traffic writes them."""
    if not isinstance(value, Mapping):
        return {}
    bins = {power: whole(value, str(power)) for power in _SIZE_BINS}
    return {power: count for power, count in bins.items() if count}


def is_own_file(path: Path) -> bool:
    """Whether it is a regular file of its folder: not a pipe, which might block, nor a link to a file elsewhere,
    whose content would end up in a page shown to others.
    """
    try:
        return path.is_file() and path.resolve().parent.is_relative_to(path.parent.resolve())
    except OSError:  # links in a circle
        return False


def text_file(path: Path, notes: list[str]) -> str:
    """Read a text file; if it cannot be read, return "" and add a note."""
    if not is_own_file(path):
        notes.append(f"There is no {path.name}.")
        return ""
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_TEXT_FILE + 1)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
        return ""
    if len(content) > LARGEST_TEXT_FILE:
        notes.append(f"{path.name} is larger than {LARGEST_TEXT_FILE // 1024} KiB: the rest is left out.")
    return content[:LARGEST_TEXT_FILE].decode("utf-8", "replace")


def json_file(path: Path, notes: list[str]) -> Row:
    content = text_file(path, notes)
    row = _parse_object(content.encode()) if content else {}
    if row is None:
        notes.append(f"{path.name} is not a JSON object and was left out.")
    return row or {}


def rows(path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the objects of a JSONL file. The last line may still be incomplete."""
    if not is_own_file(path):
        notes.append(f"There is no {path.name}: single steps are not known.")
        return
    bad: list[int] = []
    dropped: Counter[str] = Counter()
    try:
        with open_regular(path) as file:
            for place, line in enumerate(_lines(file), start=1):
                row = _parse_object(line)
                if row is not None:
                    dropped.update(_without_number(row))
                    yield row
                elif not line.endswith(b"\n"):
                    notes.append(
                        f"The last line of {path.name} is incomplete: the run is writing it, or was killed."
                    )
                elif line.strip():
                    bad.append(place)
    except OSError as error:
        notes.append(f"{path.name} cannot be read to its end: {error.strerror}.")
    if bad:
        notes.append(
            f"{len(bad)} lines of {path.name} are not JSON objects and were left out, starting with line {bad[0]}."
        )
    if dropped:
        notes.append(_describe_dropped(dropped, path.name))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines; one that is too long becomes a line that is not JSON."""
    while line := file.readline(LONGEST_LINE):
        shown = line
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)
            shown = _TOO_LONG + line[-1:]
        yield shown


def _without_number(row: Row) -> Iterator[str]:
    """The columns of a line that should hold a number and do not; non-finite values are written as null."""
    if row.get("event") in _OF_NUMBERS:
        yield from (text(name) for name in row if name not in _NO_NUMBERS and number(row[name]) is None)
    traffic, sent = row.get("traffic"), row.get("sent_bytes")
    for part in traffic if isinstance(traffic, list) else ():
        if isinstance(part, dict):
            yield from (name for name in _MOVED if name in part and number(part[name]) is None)
    for ranks in sent.values() if isinstance(sent, dict) else ():
        if isinstance(ranks, list):
            yield from ("sent_bytes" for value in ranks if number(value) is None)


def _describe_dropped(dropped: Counter[str], name: str) -> str:
    """
    >>> _describe_dropped(Counter({"loss": 3, "threshold": 1}), "metrics.jsonl")
    'Values in metrics.jsonl that are not finite numbers were left out: loss (3), threshold (1).'
    """
    shown = [f"{column} ({count:,})" for column, count in dropped.most_common(_MOST_NAMES)]
    more = ["…"] if len(dropped) > _MOST_NAMES else []
    return f"Values in {name} that are not finite numbers were left out: {', '.join([*shown, *more])}."


def _parse_object(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
