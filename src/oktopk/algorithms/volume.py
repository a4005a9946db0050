"""Volume formulas: words of four bytes that a rank sends in a step, for n entries of which it sends k."""

from __future__ import annotations

WORD_BYTES = 4


def ring_words(size: float, world: int) -> float:
    """2n(P-1)/P: the ring all-reduce, which is optimal for dense vectors.

    >>> ring_words(1000, 4)
    1500.0
    """
    return 2 * size * (world - 1) / world


def least_words(count: float, world: int) -> float:
    """2k(P-1)/P: the lower bound for an exchange of k plain indices and values.

    >>> least_words(10, 5)
    16.0
    """
    return 2 * count * (world - 1) / world


def oktopk_words(count: float, world: int) -> float:
    """6k(P-1)/P: the upper bound of Ok-Topk, on average.

    >>> oktopk_words(10, 5)
    48.0
    """
    return 6 * count * (world - 1) / world
