"""Collective errors: all ranks raise them at the same point, so no rank has to notify the others."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def mark_collective(error: E) -> E:
    """Mark an error as raised by all ranks at the same point."""
    error.collective = True  # type: ignore[attr-defined]
    return error


def is_collective(error: BaseException) -> bool:
    return bool(getattr(error, "collective", False))
