"""Imported before everything else: Ctrl-C ends an `oktopk` command with one line, also while it imports torch."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from .utils.signals import interrupted_code


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(interrupted_code(error))
    sys.__excepthook__(kind, error, trace)


if os.path.basename(sys.argv[0]) in ("oktopk", "-m"):  # "-m" is what `python -m oktopk` has until it is found
    sys.excepthook = _end
