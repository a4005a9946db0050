"""The colours of the charts: the colour-blind safe palette of Okabe and Ito, one colour per quantity."""

from __future__ import annotations

from collections.abc import Sequence

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, RED, PINK = "#E69F00", "#D55E00", "#CC79A7"
GREY, PALE = "#808080", "#B8B8B8"

STAGE = {
    "forward": BLUE,
    "backward": SKY,
    "select": GREEN,
    "encode": YELLOW,
    "sums": PINK,
    "exchange": ORANGE,
    "wait": RED,
    "hand_over": GREY,
    "rest": PALE,
}
STAGE_NAME = {
    "forward": "forward",
    "backward": "backward",
    "select": "select",
    "encode": "encode and decode",
    "sums": "sums and copies",
    "exchange": "exchange",
    "wait": "wait for late ranks",
    "hand_over": "hand-over and loss round",
    "rest": "rest (data, update)",
}
GROUP = {"compute": BLUE, "compress": GREEN, "communicate": ORANGE, "wait": RED, "rest": PALE}
GROUP_NAME = {
    "compute": "compute",
    "compress": "compress",
    "communicate": "communicate",
    "wait": "wait for late ranks",
    "rest": "rest (data, update)",
}
LOSS, VALIDATION, SKIPPED = BLUE, ORANGE, RED
TARGET, LOCAL, GLOBAL = GREY, GREEN, PINK
SENT, RING, SIX_K, TWO_K = ORANGE, GREY, RED, BLUE
RESIDUAL = SKY
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, YELLOW)
"""Colours by position, for kinds of messages and metrics."""
DASHES = ("solid", "dash", "dot", "dashdot")
_DENSE, _OURS = ("dense", "ddp"), "oktopk"
_OTHERS = (ORANGE, GREEN, PINK, RED, SKY, YELLOW)
_SHADES = (0.0, 0.4, -0.3, 0.6, -0.5)
"""How far the settings of an algorithm go towards white, or, if negative, towards black."""


def faint(colour: str, share: float = 0.2) -> str:
    """A transparent version, for the area between lowest and highest."""
    red, green, blue = _parts(colour)
    return f"rgba({red},{green},{blue},{share:g})"


def shade(colour: str, share: float) -> str:
    """
    >>> shade("#808080", 0.5), shade("#808080", -0.5)
    ('#c0c0c0', '#404040')
    """
    end = 255 if share > 0 else 0
    return "#" + "".join(f"{round(part + (end - part) * abs(share)):02x}" for part in _parts(colour))


def _parts(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return red, green, blue


def series_style(place: int) -> tuple[str, str]:
    """Colour and dash of the n-th series; repeated colours get another dash."""
    return SERIES[place % len(SERIES)], DASHES[place // len(SERIES) % len(DASHES)]


def family_styles(algorithms: Sequence[str]) -> list[tuple[str, str]]:
    """Colour and dash of each setting, given its algorithm: one hue for each algorithm, in shades and dashes.

    >>> family_styles(["dense", "oktopk", "topka", "oktopk"])
    [('#808080', 'solid'), ('#0072b2', 'solid'), ('#e69f00', 'solid'), ('#66aad1', 'dash')]
    """
    others = [name for name in dict.fromkeys(algorithms) if name not in (*_DENSE, _OURS)]
    hues = {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(others)}
    hues |= dict.fromkeys(_DENSE, GREY) | {_OURS: BLUE}
    seen: dict[str, int] = {}
    styles = []
    for name in algorithms:
        place = seen[name] = seen.get(name, -1) + 1
        again = others.index(name) // len(_OTHERS) if name in others else 0
        styles.append((shade(hues[name], _SHADES[place % len(_SHADES)]), DASHES[(place + again) % len(DASHES)]))
    return styles
