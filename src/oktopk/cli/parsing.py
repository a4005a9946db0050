"""Parse option values: lists like `a,b,c` and counts like `25M`."""

from __future__ import annotations

import argparse
import re

from oktopk.tools.lab import parse_rate

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)", re.IGNORECASE)
_SECONDS = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(s|ms|us)?")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def split_list(text: str) -> list[str]:
    """Split a comma-separated list; drop blanks and repeats, keep the order.

    >>> split_list("oktopk, dense,,oktopk")
    ['oktopk', 'dense']
    """
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_whole(text: str) -> int:
    """Parse a whole number; an argparse type.

    >>> parse_whole("16")
    16
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def parse_number(text: str) -> float:
    """Parse a number; an argparse type.

    >>> parse_number("0.5")
    0.5
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def parse_count(text: str) -> int:
    """Parse a large number with an optional unit; an argparse type.

    >>> parse_count("25M"), parse_count("1.5k"), parse_count("27,569,568")
    (25000000, 1500, 27569568)
    """
    match = _COUNT.fullmatch(text.replace(",", ""))
    size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 1 <= size < 2**40:
        raise argparse.ArgumentTypeError(f"must be a number like 25M, 300k or 1000, got {text!r}")
    return size


def parse_seconds(text: str) -> float:
    """Parse a duration, in seconds unless it has a unit; an argparse type.

    >>> parse_seconds("0.25"), parse_seconds("250ms"), parse_seconds("2s")
    (0.25, 0.25, 2.0)
    """
    match = _SECONDS.fullmatch(text)
    seconds = float(match[1]) / {"ms": 1e3, "us": 1e6}.get(match[2], 1.0) if match else 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"must be a time like 0.25 or 250ms, got {text!r}")
    return seconds


def parse_link(text: str) -> float:
    """Parse the rate of a link, in bits per second; an argparse type.

    >>> parse_link("100mbit")
    100000000.0
    """
    try:
        return float(parse_rate(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
