"""The letters of lstman4's transcripts, and how its output becomes text again."""

from __future__ import annotations

from collections.abc import Iterable

from ..problems import DataError

LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""29 of them; the place in the string is the class."""
BLANK = 0
"""CTC's class for "nothing new here"; it never stands in a transcript."""

_CLASS = {letter: number for number, letter in enumerate(LABELS) if number != BLANK}
_UPPER = {ord(small): small.upper() for small in "abcdefghijklmnopqrstuvwxyz"}


def normalise(text: str) -> str:
    """Capital letters, single spaces, none at the ends. Only a–z change: ß is for `encode` to refuse.

    >>> normalise(" start\\n over ")
    'START OVER'
    """
    return " ".join(text.translate(_UPPER).split())


def encode(text: str, source: str = "transcript") -> list[int]:
    """The classes of a text; `source` is the file that an error names.

    >>> encode("a b")
    [2, 28, 3]
    """
    text = normalise(text)
    unknown = sorted(set(text) - _CLASS.keys())
    if unknown:
        names = ", ".join(repr(letter) for letter in unknown)
        raise DataError(f"{source}: unknown characters {names}; known are A–Z, ' and space")
    if not text:
        raise DataError(f"{source}: the transcript is empty")
    return [_CLASS[letter] for letter in text]


def decode(classes: Iterable[int]) -> str:
    """The text of classes as they stand in a target: nothing is merged.

    >>> decode(encode("hello"))
    'HELLO'
    """
    return "".join(LABELS[number] for number in classes if number != BLANK)


def greedy_decode(best: Iterable[int]) -> str:
    """The text of the best class of each frame: repeats are one letter, and blanks part letters.

    >>> greedy_decode([2, 2, 0, 2, 28, 28, 3, 0])
    'AA B'
    """
    text, last = [], BLANK
    for number in best:
        if number not in (last, BLANK):
            text.append(LABELS[number])
        last = number
    return normalise("".join(text))
