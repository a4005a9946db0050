"""Local selection: exact top-k, a tracked threshold, or a Gaussian fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch

from ..feedback.accumulator import Accumulator
from ..kernels import SLOPE_STEP, SMALLEST, Picked, backend, bin_edge, bin_of
from ..wire.sparse_vector import SparseVector

LOW, HIGH = 0.8, 1.25
"""A tracked selection has LOW·k to HIGH·k entries; outside that band the threshold is evaluated exactly."""

MARGIN = 1.25
"""The pass over memory aims at MARGIN·k entries, so that it finds the top k among them."""

ROOM, MORE = 4, 16
"""That pass has room for ROOM·k entries; a second pass makes room for up to MORE·k."""

_LARGEST = float(np.finfo(np.float32).max)
_SLOPES = (0.3, 30.0)
"""Slopes that a tracker believes."""

BINS = 64
"""Histogram bins on either side of a threshold: a quarter of an octave, about 20 %."""


def target_count(size: int, density: float) -> int:
    """k for a density: at least one of `size` entries, unless there are none."""
    return min(size, max(1, math.floor(size * density)))


def is_count(x: object) -> bool:
    """Whether something that was read from a file is an integer of at least 0 that fits into 64 bits."""
    return type(x) is int and 0 <= x < 1 << 63


def is_threshold(x: object) -> bool:
    """Whether something that was read from a file is a finite magnitude in float32."""
    return type(x) in (int, float) and 0 <= x <= _LARGEST  # type: ignore[operator]


def hard_cap(k: int) -> int:
    return max(k, math.floor(HIGH * k))


@dataclass(frozen=True)
class Chosen:
    """The result of a local selection.

    Attributes:
        vector: The selected entries.
        threshold: Magnitude from which on entries were selected.
        finite: False if the accumulator has a non-finite number; the step must then be skipped.
        exact: The threshold was evaluated over all entries: these are the top k.
    """

    vector: SparseVector
    threshold: float
    finite: bool = True
    exact: bool = False


def exact_top_k(acc: Accumulator, k: int, picked: Picked) -> Chosen:
    """Select exactly the k entries of largest magnitude, fewer if fewer are non-zero. The lowest index wins a tie.

    `picked` is the result of an earlier pass. If it contains the top k, no further pass is needed.
    """
    if not picked.finite:
        return Chosen(SparseVector.empty(acc.size), 0.0, finite=False)
    if k == acc.size:
        return Chosen(acc.vector(acc.select(0.0, k)), 0.0, exact=True)
    if picked.complete and picked.count >= k:
        top, _ = acc.vector(picked).largest(k)
        return Chosen(top, float(top.values.abs().min()), exact=True)
    threshold = max(SMALLEST, acc.kth_magnitude(k))
    picked = acc.select(threshold, k)
    vector = acc.vector(picked) if picked.complete else _select_with_ties(acc, k, threshold)
    return Chosen(vector, threshold, exact=True)


def _select_with_ties(acc: Accumulator, k: int, threshold: float) -> SparseVector:
    next_up = torch.nextafter(torch.tensor(threshold), torch.tensor(math.inf)).item()
    larger = acc.select(next_up, k)
    ties = acc.first_equal(threshold, k - larger.count)
    indices = torch.cat([larger.indices, ties]).sort().values.cpu()
    return SparseVector(indices, acc.at(indices), acc.size)


@dataclass(frozen=True)
class Tracker:
    """Predicts the next threshold from the last one and the count it gave.

    Works in log space, because thresholds move over orders of magnitude: near the threshold the count falls like
    threshold^-slope, so a factor f^(1/slope) corrects a count that is off by a factor f.
    """

    threshold: float
    count: int
    slope: float = 2.0
    age: int = 0

    def threshold_for(self, k: float) -> float:
        """The threshold that should select about k entries on the next step."""
        if self.count == 0:
            return self.threshold
        correction: float = (self.count / k) ** (1.0 / self.slope)
        return self.threshold * min(2.0, max(0.5, correction))

    def after(self, threshold: float, count: int, *, exact: bool) -> Tracker:
        return replace(self, threshold=threshold, count=count, age=0 if exact else self.age + 1)

    def with_slope(self, count: int, above: int) -> Tracker:
        """Average the slope with the new estimate of -d log(count) / d log(threshold).

        `above` is the count at SLOPE_STEP times the threshold.
        """
        if count < 32 or above == 0:
            return self
        measured = math.log(count / above) / math.log(SLOPE_STEP)
        low, high = _SLOPES
        return replace(self, slope=0.5 * self.slope + 0.5 * min(high, max(low, measured)))

    def is_sane(self, size: int) -> bool:
        """Whether a tracker that was read from a file can be one, of a tensor with `size` entries."""
        slope_is_sane = type(self.slope) in (int, float) and _SLOPES[0] <= self.slope <= _SLOPES[1]
        counts_are_sane = is_count(self.count) and self.count <= size and is_count(self.age)
        return is_threshold(self.threshold) and slope_is_sane and counts_are_sane


def in_band(count: int, k: int) -> bool:
    return max(1, math.floor(LOW * k)) <= count <= hard_cap(k)


def nearest_edge(counts: Sequence[int], k: int) -> tuple[int, int]:
    """The bin of a histogram from which on upwards about k entries lie, and their number.

    >>> nearest_edge([5, 4, 3, 2], 6)  # from bin 2 on there are 5, from bin 1 on 9
    (2, 5)
    """
    at_least = np.cumsum(np.asarray(counts)[::-1])[::-1]
    best = int(np.argmin(np.abs(at_least - k)))
    return best, int(at_least[best])


@dataclass(frozen=True)
class TrackedSelection:
    """Local selection of Ok-Topk: one pass with a tracked threshold, refined among the entries it finds.

    The pass aims MARGIN too low. A histogram of what it finds gives the right threshold, even when all gradients
    grow or shrink by some percent from step to step. Every `exact_every` steps, and whenever the count leaves the
    band, the top k are selected exactly.
    """

    exact_every: int

    def select(self, acc: Accumulator, k: int, tracker: Tracker | None) -> tuple[Chosen, Tracker]:
        """Select about k entries. Also returns the tracker for the next step."""
        due = tracker is None or tracker.age + 1 >= self.exact_every or k == acc.size
        low = math.inf if tracker is None else max(SMALLEST, tracker.threshold_for(MARGIN * k))
        picked = acc.select(low, ROOM * k)
        # If gradients grew, a second pass is still cheaper than an exact search.
        if ROOM * k < picked.count <= MORE * k:
            picked = acc.select(low, picked.count)
        tracker = (tracker or Tracker(low, 0)).with_slope(picked.count, picked.above)
        if picked.finite and picked.complete and not due:
            found = acc.vector(picked)
            threshold = self._refine(found, low, k)
            vector = found.at_least(threshold)
            if in_band(len(vector), k):
                return Chosen(vector, threshold), tracker.after(threshold, len(vector), exact=False)
        chosen = exact_top_k(acc, k, picked)
        return chosen, tracker.after(chosen.threshold, len(chosen.vector), exact=True)

    @staticmethod
    def _refine(picked: SparseVector, low: float, k: int) -> float:
        """The bin edge, not below low, that keeps about k of the picked entries."""
        first = bin_of(low) + 1
        histogram = backend(picked.values).magnitude_histogram(picked.values, first, 2 * BINS)
        best, count = nearest_edge(histogram, k)
        return low if abs(len(picked) - k) <= abs(count - k) else bin_edge(first + best)


def select_exact(acc: Accumulator, k: int, last: float | None) -> Chosen:
    """Select exactly the top k. The threshold of the last step, if known, saves a search."""
    return exact_top_k(acc, k, acc.select(math.inf if last is None else max(SMALLEST, 0.9 * last), 2 * k))


def select_gaussian(acc: Accumulator, k: int, rounds: int = 8) -> Chosen:
    """Select by a threshold from a normal fit to |acc|, refined by counting until 2k/3 to 4k/3 are above it."""
    low, high = math.ceil(2 * k / 3), max(k, math.floor(4 * k / 3))
    first = acc.select(math.inf, 0)
    if not first.finite or k == acc.size:
        return exact_top_k(acc, k, first)
    mean, deviation = acc.moments()
    threshold = max(SMALLEST, mean + deviation * NormalDist().inv_cdf(1.0 - k / acc.size))
    below, above = 0.0, math.inf  # thresholds known to be too low and too high
    for _ in range(rounds):
        picked = acc.select(threshold, high)
        if low <= picked.count <= high:
            return Chosen(acc.vector(picked), threshold)
        if picked.count > high:
            below = threshold
        else:
            above = threshold
        guess = threshold * min(4.0, max(0.25, math.sqrt(max(picked.count, 1) / k)))
        middle = math.sqrt(max(below, SMALLEST) * above) if above < math.inf else guess
        threshold = max(SMALLEST, guess if below < guess < above else middle)
    return exact_top_k(acc, k, first)
