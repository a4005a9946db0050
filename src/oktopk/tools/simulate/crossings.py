"""Find where one algorithm becomes faster than another, and compute the bounds of the literature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from oktopk.algorithms.volume import least_words, oktopk_words, ring_words

from .study import Answer


@dataclass(frozen=True)
class Crossing:
    """From about `ranks` ranks on, one is faster than the other; interpolated between two simulated numbers."""

    faster: str
    slower: str
    ranks: float
    after: int
    until: int


def find_crossings(answers: Sequence[Answer]) -> list[Crossing]:
    """Find all crossings, sorted by ranks; times are interpolated linearly in logarithms."""
    times: dict[str, dict[int, float]] = {}
    for one in answers:
        times.setdefault(one.algorithm, {})[one.ranks] = one.step.seconds
    found = [
        crossing for a, b in permutations(times, 2) for crossing in _find_overtaking(a, times[a], b, times[b])
    ]
    return sorted(found, key=lambda crossing: crossing.ranks)


def _find_overtaking(a: str, of_a: Mapping[int, float], b: str, of_b: Mapping[int, float]) -> list[Crossing]:
    """Find where a, which was slower, becomes faster than b."""
    found = []
    for low, high in pairwise(sorted(of_a)):
        behind = math.log(of_a[low] / of_b[low])
        ahead = math.log(of_b[high] / of_a[high])
        if behind >= 0 and ahead > 0:
            share = behind / (behind + ahead)
            found.append(Crossing(a, b, low * (high / low) ** share, low, high))
    return found


@dataclass(frozen=True)
class Bounds:
    """Words of four bytes that a rank sends in a step."""

    sparse: float
    """2k(P-1)/P: the lower bound of any sparse all-reduce."""
    oktopk: float
    """6k(P-1)/P: the upper bound of Ok-Topk, on average."""
    dense: float
    """2n(P-1)/P: a ring, which is optimal for dense vectors."""


def bounds(ranks: int, size: int, k: float) -> Bounds:
    return Bounds(least_words(k, ranks), oktopk_words(k, ranks), ring_words(size, ranks))
