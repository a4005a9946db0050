"""The learning rate of a step, from the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from .base import Clock

Schedule = Callable[[float, Clock], float]


def annealed(divisor: float) -> Schedule:
    """Divided by the same number after every epoch.

    >>> clock = Clock(epoch=5, step=70, steps_per_epoch=14, total_steps=140, world=8)
    >>> round(annealed(1.01)(0.01, clock), 6)
    0.009515
    """
    return lambda lr, clock: lr / divisor**clock.epoch


def tenth_at(*epochs: int, warmup_epochs: int = 0) -> Schedule:
    """A tenth from each of these epochs on. The warm-up goes from lr / P up to lr, evenly, step by step.

    >>> clock = Clock(epoch=81, step=810, steps_per_epoch=10, total_steps=1610, world=4)
    >>> round(tenth_at(81, 122, warmup_epochs=10)(0.1, clock), 6)
    0.01
    """

    def schedule(lr: float, clock: Clock) -> float:
        warmup = warmup_epochs * clock.steps_per_epoch
        if clock.step < warmup:
            start = lr / clock.world
            return start + (lr - start) * clock.step / warmup
        return lr / 10.0 ** sum(clock.epoch >= epoch for epoch in epochs)

    return schedule


def linear(warmup_share: float) -> Schedule:
    """Up from nothing over the first share of all steps, then evenly down, to nothing after the last one.

    >>> clock = Clock(epoch=0, step=55, steps_per_epoch=100, total_steps=100, world=1)
    >>> round(linear(0.1)(1.0, clock), 6)
    0.5
    """

    def schedule(lr: float, clock: Clock) -> float:
        warmup = round(warmup_share * clock.total_steps)
        done = clock.step + 1
        if done <= warmup:
            return lr * done / warmup
        return lr * max(clock.total_steps - clock.step, 0) / (clock.total_steps - warmup)

    return schedule
