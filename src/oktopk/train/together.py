"""Errors that all ranks raise at the same point: nobody is left waiting, so nobody has to be told."""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def raised_by_all(error: E) -> E:
    """Mark an error as such."""
    error.raised_by_all = True  # type: ignore[attr-defined]
    return error


def is_raised_by_all(error: BaseException) -> bool:
    return bool(getattr(error, "raised_by_all", False))
