"""Check that a plot can be written, before minutes of work are spent on it."""

from __future__ import annotations

from pathlib import Path

from oktopk.utils.extras import install_command

FORMATS = (".png", ".svg", ".pdf")


def figure_problem(path: Path) -> str | None:
    """Return why no plot can be written to this file, and what to do about it; None if it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"--figure needs matplotlib: {install_command('report')}"
    if path.suffix not in FORMATS:
        return f"--figure must end with {', '.join(FORMATS)}, got {path}"
    return None
