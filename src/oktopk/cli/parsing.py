"""Parse option values: lists like `a,b,c` and counts like `25M`."""

from __future__ import annotations

import argparse
import re

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def split_list(text: str) -> list[str]:
    """Split a comma-separated list; drop blanks and repeats, keep the order.

    >>> split_list("oktopk, dense,,oktopk")
    ['oktopk', 'dense']
    """
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


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
