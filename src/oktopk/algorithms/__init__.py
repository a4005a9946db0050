"""The algorithms. ALGORITHMS has their classes by the name that `algorithm=` takes.

The fields of a class are its hyper-parameters; an instance with other values can be passed instead of a name.
Plug-ins add to it by an entry point of the group `oktopk.algorithms`, or by assignment (docs/plugins.md).

Example:
    >>> import oktopk
    >>> list(oktopk.ALGORITHMS)
    ['dense', 'topka', 'topkdsa', 'gtopk', 'gaussiank', 'oktopk', 'oktopk-static']
    >>> oktopk.ALGORITHMS["oktopk"](tau=32)
    OkTopk(tau=32, tau_prime=32, imbalance=2.0)
"""

from __future__ import annotations

import inspect
from typing import Any

from ..utils.registry import Registry
from .base import Algorithm, Reduction, skip
from .dense import Dense
from .gaussiank import Gaussiank
from .gtopk import GTopk
from .oktopk import OkTopk
from .oktopk_static import OkTopkStatic
from .selection import Chosen, select_exact
from .topka import TopkA, gather_all
from .topkdsa import TopkDSA


def _accept(name: str, thing: Any) -> type[Algorithm]:
    if not isinstance(thing, type) or not issubclass(thing, Algorithm) or inspect.isabstract(thing):
        raise TypeError(f"expected a subclass of oktopk.Algorithm that implements reduce(), got {thing!r}")
    if getattr(thing, "name", None) != name:
        raise ValueError(f"{thing.__name__}.name must be {name!r}, as metrics show it")
    return thing


ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    "oktopk.algorithms",
    _accept,
    {
        "dense": Dense,
        "topka": TopkA,
        "topkdsa": TopkDSA,
        "gtopk": GTopk,
        "gaussiank": Gaussiank,
        "oktopk": OkTopk,
        "oktopk-static": OkTopkStatic,
    },
)
"""Every algorithm by name."""


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Return the algorithm of that name with default settings, or the given instance."""
    return algorithm if isinstance(algorithm, Algorithm) else ALGORITHMS.find(algorithm)()


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Chosen",
    "Dense",
    "GTopk",
    "Gaussiank",
    "OkTopk",
    "OkTopkStatic",
    "Reduction",
    "TopkA",
    "TopkDSA",
    "find_algorithm",
    "gather_all",
    "select_exact",
    "skip",
]
