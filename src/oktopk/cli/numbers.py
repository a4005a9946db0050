"""Large numbers as people write them."""

from __future__ import annotations

import argparse
import re

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def count(word: str) -> int:
    """
    >>> count("25M"), count("1.5k"), count("27,569,568")
    (25000000, 1500, 27569568)
    """
    match = _COUNT.fullmatch(word.replace(",", ""))
    size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 1 <= size < 2**40:
        raise argparse.ArgumentTypeError(f"must be a number like 25M, 300k or 1000, got {word!r}")
    return size
