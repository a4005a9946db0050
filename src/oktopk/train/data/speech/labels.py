"""The labels of lstman4: encode transcripts, decode outputs."""

from __future__ import annotations

from collections.abc import Iterable

from ..problems import DataError

LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""29 labels; the position in the string is the class."""
BLANK = 0
"""The CTC blank; it never occurs in a transcript."""

_CLASS = {letter: number for number, letter in enumerate(LABELS) if number != BLANK}
_UPPER = {ord(small): small.upper() for small in "abcdefghijklmnopqrstuvwxyz"}


def normalise(text: str) -> str:
    """Convert a–z to capitals, and collapse and strip spaces. Other letters stay, and `encode` refuses them.

    >>> normalise(" start\\n over ")
    'START OVER'
    """
    return " ".join(text.translate(_UPPER).split())


def encode(text: str, source: str = "transcript") -> list[int]:
    """Encode a text as classes; errors name `source`.

    >>> encode("a b")
    [2, 28, 3]
    """
    text = normalise(text)
    unknown = sorted(set(text) - _CLASS.keys())
    if unknown:
        names = ", ".join(repr(letter) for letter in unknown)
        raise DataError(f"{source}: unknown characters {names}; expected A–Z, ' and space")
    if not text:
        raise DataError(f"{source}: the transcript is empty")
    return [_CLASS[letter] for letter in text]


def decode(classes: Iterable[int]) -> str:
    """Decode target classes to text; repeats are kept.

    >>> decode(encode("hello"))
    'HELLO'
    """
    return "".join(LABELS[number] for number in classes if number != BLANK)


def greedy_decode(best: Iterable[int]) -> str:
    """Decode the best class of each frame: merge repeats, then drop blanks.

    >>> greedy_decode([2, 2, 0, 2, 28, 28, 3, 0])
    'AA B'
    """
    text, last = [], BLANK
    for number in best:
        if number not in (last, BLANK):
            text.append(LABELS[number])
        last = number
    return normalise("".join(text))
