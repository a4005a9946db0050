"""The scripts of benchmarks/, for tests that look inside them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from tests.support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module of its own, with the `common` that lies beside it, until the test has ended."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for one in ("common", name):
        monkeypatch.delitem(sys.modules, one, raising=False)
    return importlib.import_module(name)
