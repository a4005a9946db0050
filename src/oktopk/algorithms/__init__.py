"""The algorithms, by name."""

from __future__ import annotations

from .base import Algorithm, Reduction
from .dense import Dense
from .gaussiank import Gaussiank
from .gtopk import GTopk
from .oktopk import OkTopk
from .topka import TopkA
from .topkdsa import TopkDSA

ALGORITHMS: dict[str, type[Algorithm]] = {
    "dense": Dense,
    "topka": TopkA,
    "topkdsa": TopkDSA,
    "gtopk": GTopk,
    "gaussiank": Gaussiank,
    "oktopk": OkTopk,
}


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of that name with its default settings, or the one given."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm]()


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Dense",
    "GTopk",
    "Gaussiank",
    "OkTopk",
    "Reduction",
    "TopkA",
    "TopkDSA",
    "find_algorithm",
]
