"""Whether a picture can be drawn, told before minutes of work are done for it."""

from __future__ import annotations

from pathlib import Path

FORMATS = (".png", ".svg", ".pdf")


def drawing_problem(path: Path) -> str | None:
    """Why no picture can be drawn into this file, and what to do about it; None when one can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "--figure needs matplotlib: pip install 'oktopk[report]'"
    if path.suffix not in FORMATS:
        return f"--figure must end with {', '.join(FORMATS)}, got {path}"
    return None
