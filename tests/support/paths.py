"""Where things are: the repository, and the real data sets where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("OKTOPK_DATA") or ROOT.parent / "shared" / "data")
