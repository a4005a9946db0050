"""Hierarchical all-reduce: the ranks of a host average among themselves, and one of them speaks for all."""

from __future__ import annotations

from .local_group import LocalGroup

__all__ = ["LocalGroup"]
