"""The links of a race: a rate between hosts in network namespaces, loopback, or loopback with pauses."""

from __future__ import annotations

import math

from oktopk.tools.lab import parse_rate

LOOPBACK = "none"
"""The link of cells that run on loopback."""
PACED = "paced:"
"""Before a rate: ranks are on loopback, and pause after each step as long as the link would take for its bytes."""


def link_rate(link: str) -> float:
    """Bits per second; infinity on loopback. Raises ValueError if the link is not understood.

    >>> link_rate("100mbit"), link_rate("paced:1gbit"), link_rate("none")
    (100000000.0, 1000000000.0, inf)
    """
    return math.inf if link == LOOPBACK else float(parse_rate(link.removeprefix(PACED)))


def needs_lab(link: str) -> bool:
    """Whether the link is one of network namespaces.

    >>> [link for link in ("100mbit", "paced:100mbit", "none") if needs_lab(link)]
    ['100mbit']
    """
    return link != LOOPBACK and not link.startswith(PACED)


def pause_seconds(link: str, sent_bytes: float) -> float:
    """How long a rank on loopback pauses after a step in which it has sent so many bytes.

    >>> pause_seconds("paced:100mbit", 5e6), pause_seconds("100mbit", 5e6), pause_seconds("none", 5e6)
    (0.4, 0.0, 0.0)
    """
    return 8 * sent_bytes / link_rate(link) if link.startswith(PACED) else 0.0


def link_name(link: str) -> str:
    """The link as tables show it.

    >>> link_name("none"), link_name("paced:100mbit"), link_name("1gbit")
    ('loopback', '100mbit (paced)', '1gbit')
    """
    if link == LOOPBACK:
        return "loopback"
    return f"{link.removeprefix(PACED)} (paced)" if link.startswith(PACED) else link
