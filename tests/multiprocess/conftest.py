"""Worlds of processes are made by the helper of the contract tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
