"""One colour for one thing, on every chart: those of Okabe and Ito, which the colour-blind can tell apart."""

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
ASKED, LOCAL, GLOBAL = GREY, GREEN, PINK
SENT, RING, SIX_K, TWO_K = ORANGE, GREY, RED, BLUE
RESIDUAL = SKY
SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, YELLOW)
"""For things that are known by their order only: runs, kinds of messages."""
DASHES = ("solid", "dash", "dot", "dashdot")


def faint(colour: str) -> str:
    """For the area between the lowest and the highest."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def of_series(place: int) -> tuple[str, str]:
    """Colour and dash of the n-th thing: colours come again with another dash."""
    return SERIES[place % len(SERIES)], DASHES[place // len(SERIES) % len(DASHES)]
