"""Lists as people write them."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """Each once, in the order given.

    >>> words("oktopk, dense,,oktopk")
    ['oktopk', 'dense']
    """
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
