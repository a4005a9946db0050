"""Names that somebody has typed: suggest the one that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that resembles the word most; None if none does.

    >>> closest("desnity", ["density", "values"]), closest("OkTopk", ["oktopk"]), closest("zip", ["oktopk"])
    ('density', 'oktopk', None)
    """
    spelled = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), spelled, 1)
    return spelled[found[0]] if found else None


def hint(word: str, known: Iterable[str]) -> str:
    """What to do about a word that is no known name.

    >>> hint("gtopkk", ["dense", "gtopk"])
    "did you mean 'gtopk'?"
    >>> hint("zip", ["dense", "gtopk"])
    'choose from dense, gtopk'
    """
    names = list(known)
    found = closest(word, names)
    return f"choose from {', '.join(names)}" if found is None else f"did you mean {found!r}?"
