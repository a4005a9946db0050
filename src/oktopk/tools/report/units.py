"""Numbers as people read them, with their units."""

from __future__ import annotations

from collections.abc import Sequence

NOT_KNOWN = "not known"


def scaled(value: float | None, unit: str, prefixes: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """
    >>> scaled(64090.8, "B"), scaled(999, "B"), scaled(None, "B"), scaled(1e300, "B")
    ('64.1 kB', '999 B', 'not known', '1e+300 B')
    """
    if value is None:
        return NOT_KNOWN
    for place, prefix in enumerate(prefixes):
        if abs(value) < 999.5 * 1000**place:
            return f"{value / 1000**place:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def byte_text(value: float | None) -> str:
    return scaled(value, "B")


def seconds_text(value: float | None) -> str:
    """
    >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(7200.0), seconds_text(0)
    ('12.3 ms', '2.5 s', '2 h', '0 ms')
    """
    if value is None:
        return NOT_KNOWN
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    if value < 600:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def percent(share: float | None) -> str:
    """
    >>> percent(0.00999), percent(0.5), percent(None)
    ('0.999 %', '50 %', 'not known')
    """
    return NOT_KNOWN if share is None else f"{100 * share:.3g} %"


def size_text(power: int) -> str:
    """The smallest message of a bin.

    >>> size_text(9), size_text(12), size_text(22)
    ('512 B', '4 KiB', '4 MiB')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if power >= exponent:
            return f"{2 ** (power - exponent)} {unit}"
    return f"{2**power} B"


def few(value: float | None) -> float | None:
    """To five digits, which is more than a picture shows."""
    return None if value is None else float(f"{value:.5g}")
