"""The colours of the charts: the colour-blind safe palette of Okabe and Ito, one colour per quantity."""

from __future__ import annotations

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
LOSS, VALIDATION, SKIPPED = BLUE, ORANGE, RED
TARGET, LOCAL, GLOBAL = GREY, GREEN, PINK
SENT, RING, SIX_K, TWO_K = ORANGE, GREY, RED, BLUE
RESIDUAL = SKY
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, YELLOW)
"""Colours by position, for runs and kinds of messages."""
DASHES = ("solid", "dash", "dot", "dashdot")


def faint(colour: str) -> str:
    """A transparent version, for the area between lowest and highest."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def series_style(place: int) -> tuple[str, str]:
    """Colour and dash of the n-th series; repeated colours get another dash."""
    return SERIES[place % len(SERIES)], DASHES[place // len(SERIES) % len(DASHES)]
