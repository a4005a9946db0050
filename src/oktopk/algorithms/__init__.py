"""The algorithms. ALGORITHMS has their classes by the name that `algorithm=` takes.

The fields of a class are its hyper-parameters; an instance with other values can be passed instead of a name.

Example:
    >>> import oktopk
    >>> list(oktopk.ALGORITHMS)
    ['dense', 'topka', 'topkdsa', 'gtopk', 'gaussiank', 'oktopk']
    >>> oktopk.ALGORITHMS["oktopk"](tau=32)
    OkTopk(tau=32, tau_prime=32, imbalance=2.0)
"""

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
"""Every algorithm by name."""


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Return the algorithm of that name with default settings, or the given instance."""
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
