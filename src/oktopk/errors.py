"""Every error the library raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OkTopkError(RuntimeError):
    """Base class of the library's own errors."""


class CommError(OkTopkError):
    """A message could not be sent or received; the communicator is no longer usable."""


class CommTimeout(CommError, TimeoutError):
    """A peer did not answer within the communicator's timeout."""


class Aborted(CommError):
    """Another rank has failed and told so; its error is the one to look at."""


class NonFiniteError(OkTopkError):
    """Too many steps in a row had gradients that are not finite."""


class WireError(OkTopkError):
    """A message is damaged, stale, or was meant for somebody else."""


def name_step(error: BaseException, rank: int, step: int) -> None:
    """Let an error of communication, which says who and where, say also when, and on which rank."""
    if isinstance(error, (CommError, WireError)):
        error.args = (f"{error} (rank {rank}, step {step})",)


@contextmanager
def naming_step(rank: int, step: int) -> Iterator[None]:
    """The same for all errors of a block."""
    try:
        yield
    except (CommError, WireError) as error:
        name_step(error, rank, step)
        raise
