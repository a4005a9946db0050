"""Metrics are not worth a job: what writes them is switched off when the disk is full."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""A full disk, a quota, a limit of the file size, a failing disk, and one made read-only because it fails."""


class Switch:
    """Runs the writes of one file; the first that fails because of the disk is a warning and the last one.

    Args:
        name: What is switched off, for the warning.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.off = False

    def run(self, write: Callable[[], object]) -> None:
        """Call write(), unless an earlier one has failed. Errors of other kinds are raised."""
        if not self.off:
            self._try(write)

    def close(self, close: Callable[[], object]) -> None:
        """Call close(), also after a failure: it releases the file, and may find the disk full again."""
        self._try(close)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            if not self.off:
                self.off = True
                place = f"{error.filename}: " if error.filename else ""
                log.warning(
                    "%s is switched off, and training continues without it: %s%s", self.name, place, error.strerror
                )
