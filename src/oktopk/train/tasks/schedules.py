"""Learning rate schedules: functions of the initial learning rate and the position of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

from .base import StepPosition

Schedule = Callable[[float, StepPosition], float]


def exponential_decay(divisor: float) -> Schedule:
    """Divide the learning rate by the same number after every epoch.

    >>> position = StepPosition(epoch=5, step=70, steps_per_epoch=14, total_steps=140, world=8)
    >>> round(exponential_decay(1.01)(0.01, position), 6)
    0.009515
    """
    return lambda lr, position: lr / divisor**position.epoch


def step_decay(*epochs: int, warmup_epochs: int = 0) -> Schedule:
    """Divide by 10 at each of these epochs. The warm-up rises linearly from lr / P to lr, step by step.

    >>> position = StepPosition(epoch=81, step=810, steps_per_epoch=10, total_steps=1610, world=4)
    >>> round(step_decay(81, 122, warmup_epochs=10)(0.1, position), 6)
    0.01
    """

    def schedule(lr: float, position: StepPosition) -> float:
        warmup = warmup_epochs * position.steps_per_epoch
        if position.step < warmup:
            start = lr / position.world
            return start + (lr - start) * position.step / warmup
        return lr / 10.0 ** sum(position.epoch >= epoch for epoch in epochs)

    return schedule


def linear_decay(warmup_share: float) -> Schedule:
    """Rise linearly from 0 over the first share of all steps, then fall linearly to 0.

    >>> position = StepPosition(epoch=0, step=55, steps_per_epoch=100, total_steps=100, world=1)
    >>> round(linear_decay(0.1)(1.0, position), 6)
    0.5
    """

    def schedule(lr: float, position: StepPosition) -> float:
        warmup = round(warmup_share * position.total_steps)
        done = position.step + 1
        if done <= warmup:
            return lr * done / warmup
        return lr * max(position.total_steps - position.step, 0) / (position.total_steps - warmup)

    return schedule


def cosine_decay(warmup_share: float, final_share: float) -> Schedule:
    """Rise linearly over the first share of all steps, then fall along half a cosine to a share of the maximum.

    >>> position = StepPosition(epoch=0, step=60, steps_per_epoch=110, total_steps=110, world=1)
    >>> round(cosine_decay(1 / 11, 0.1)(1.0, position), 6)
    0.55
    """

    def schedule(lr: float, position: StepPosition) -> float:
        warmup = round(warmup_share * position.total_steps)
        if position.step < warmup:
            return lr * (position.step + 1) / warmup
        done = (position.step - warmup) / max(1, position.total_steps - warmup)
        return lr * (final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    return schedule


def constant_after_warmup(warmup_steps: int) -> Schedule:
    """Rise linearly over `warmup_steps`, if there are any, then stay.

    >>> position = StepPosition(epoch=0, step=24, steps_per_epoch=100, total_steps=100, world=1)
    >>> constant_after_warmup(50)(1.0, position)
    0.5
    """
    return lambda lr, position: lr * min(1.0, (position.step + 1) / max(1, warmup_steps))


SCHEDULES = {
    "constant": constant_after_warmup(0),
    "linear": linear_decay(0.05),
    "cosine": cosine_decay(0.05, 0.0),
}
"""What --lr-schedule offers instead of a network's own schedule."""
