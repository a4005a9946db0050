"""Format numbers with units."""

from __future__ import annotations

from collections.abc import Sequence

NOT_KNOWN = "not known"


def format_scaled(value: float | None, unit: str, prefixes: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """
    >>> format_scaled(64090.8, "B"), format_scaled(999, "B"), format_scaled(None, "B"), format_scaled(1e300, "B")
    ('64.1 kB', '999 B', 'not known', '1e+300 B')
    """
    if value is None:
        return NOT_KNOWN
    for place, prefix in enumerate(prefixes):
        if abs(value) < 999.5 * 1000**place:
            return f"{value / 1000**place:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def format_bytes(value: float | None) -> str:
    return format_scaled(value, "B")


def format_seconds(value: float | None) -> str:
    """
    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(7200.0), format_seconds(0)
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


def format_size(power: int) -> str:
    """Format the smallest message size of a bin.

    >>> format_size(9), format_size(12), format_size(22)
    ('512 B', '4 KiB', '4 MiB')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if power >= exponent:
            return f"{2 ** (power - exponent)} {unit}"
    return f"{2**power} B"


def round_for_chart(value: float | None) -> float | None:
    """Round to five digits, more than a chart shows."""
    return None if value is None else float(f"{value:.5g}")
