"""The step: absorb, reduce, release, divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..feedback.accumulator import Accumulator
from ..wire.sparse_comm import Channel
from . import Algorithm, Reduction


def reduce_step(
    algorithm: Algorithm,
    channel: Channel,
    acc: Accumulator,
    k: int,
    state: Any,
    inspect: Callable[[Accumulator], None] | None = None,
) -> tuple[Reduction, int]:
    """Run the algorithm and settle the outcome: acc becomes the mean, the residual keeps the rest.

    Returns the reduction and the number of entries in the mean: its non-zeros, or all of them if it is dense.
    When the reduction is skipped, the mean is zero and the residual is what it was before, to the bit; `inspect`
    gets to see acc before that.
    """
    if acc.size == 0:
        return Reduction(state=state), 0
    try:
        reduction = algorithm.reduce(channel, acc, k, state)
    except BaseException:
        acc.roll_back()  # nothing has been applied: the gradient must not count twice when the step is repeated
        raise
    if reduction.skipped:
        if inspect is not None:
            inspect(acc)
        acc.roll_back()
        return replace(reduction, state=state), 0
    if reduction.mean is not None:
        acc.finish_dense(reduction.mean)
        return reduction, acc.size
    acc.release(reduction.leaving)
    return reduction, acc.finish(reduction.parts, channel.world)
