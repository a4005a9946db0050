"""Every error the library raises on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OkTopkError(RuntimeError):
    """Base class of the library's own errors.

    Wrong arguments raise the built-in ValueError or TypeError instead, on every rank.

    Example:
        >>> import oktopk
        >>> issubclass(oktopk.CommTimeout, oktopk.OkTopkError)
        True
    """


class CommError(OkTopkError):
    """A message could not be sent or received. The communicator can no longer be used.

    The message names the operation, the peer, this rank and the step.

    Example:
        >>> import oktopk
        >>> def fail(comm):
        ...     if comm.rank == 1:
        ...         raise oktopk.CommError("cable cut")
        ...     comm.recv(100, 1, "example")
        >>> try:
        ...     oktopk.run_threads(2, fail)
        ... except oktopk.CommError as error:
        ...     print(error)
        cable cut
    """


class CommTimeout(CommError, TimeoutError):
    """A peer did not answer within the communicator's timeout.

    It is also a TimeoutError, so either name catches it.

    Example:
        >>> import oktopk
        >>> try:
        ...     oktopk.run_threads(2, lambda comm: comm.rank or comm.recv(100, 1, "example"), timeout=0.1)
        ... except TimeoutError as error:
        ...     print(type(error).__name__)
        CommTimeout
    """


class Aborted(CommError):
    """Another rank failed; its error is the root cause.

    Every rank that waits for the failed one raises this, with the other rank's error in the message.

    Example:
        >>> import oktopk
        >>> def train(comm):
        ...     if comm.rank == 1:
        ...         raise ValueError("out of data")
        ...     try:
        ...         comm.recv(100, 1, "example")
        ...     except oktopk.Aborted as error:
        ...         print("out of data" in str(error))
        >>> try:
        ...     oktopk.run_threads(2, train)
        ... except ValueError as error:
        ...     print("root cause:", error)
        True
        root cause: out of data
    """


class NonFiniteError(OkTopkError):
    """Too many steps in a row had non-finite gradients on some rank.

    One such step is skipped on every rank; `max_skipped` of them in a row raise this error, which names the
    parameters.

    Example:
        >>> import oktopk
        >>> try:
        ...     raise oktopk.NonFiniteError("10 steps in a row had non-finite gradients")
        ... except oktopk.OkTopkError as error:
        ...     print(error)
        10 steps in a row had non-finite gradients
    """


class WireError(OkTopkError):
    """A message is damaged, stale, or addressed to another step, bucket or rank.

    Example:
        >>> import oktopk
        >>> import torch
        >>> from oktopk.wire.message import Tag, decode
        >>> try:
        ...     tag = Tag(step=7, bucket=0, phase=0, sender=1, size=9, start=0, span=9)
        ...     decode(torch.zeros(8, dtype=torch.uint8), tag)
        ... except oktopk.WireError as error:
        ...     print(error)
        message from rank 1 (step 7, bucket 0, phase 0): 8 bytes, expected a header of 88 bytes or more
    """


def add_step(error: BaseException, rank: int, step: int) -> None:
    """Append the rank and the step to the message of a communication error."""
    if isinstance(error, (CommError, WireError)):
        error.args = (f"{error} (rank {rank}, step {step})",)


@contextmanager
def add_step_to_errors(rank: int, step: int) -> Iterator[None]:
    """Apply add_step() to every communication error that the block raises."""
    try:
        yield
    except (CommError, WireError) as error:
        add_step(error, rank, step)
        raise
