"""Format text tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with right-aligned columns, four digits, and – for None.

    >>> print(format_table(["link", "ms"], [["1gbit", 12.3456], ["no limit", None]]))
        link     ms
       1gbit  12.35
    no limit      –
    """
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
