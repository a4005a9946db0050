"""Random phrases for the generated speech, similar to those of AN4."""

from __future__ import annotations

import numpy as np

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COMMANDS = ("YES", "NO", "GO", "HELP", "STOP", "START", "ENTER", "ERASE", "RUBOUT", "REPEAT")
DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
TEENS = ("TEN", "ELEVEN", "TWELVE", "THIRTEEN", "FIFTEEN", "SEVENTEEN", "NINETEEN")
TENS = ("TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY")
NAMES = (
    "ADAM", "BECKY", "CHLOE", "DEXTER", "ESTHER", "FRITZ", "GWEN", "HUGO", "IVAN", "JACK", "KEVIN", "LUCY", "MAX",
    "NORA", "OLIVIA", "PHIL", "QUINN", "RUTH", "SVEN", "TANYA", "UTE", "VICKY", "WALTER", "XENIA", "YURI", "ZOE",
)  # fmt: skip


def phrase(random: np.random.Generator) -> str:
    """Draw a command, a spelled name, a number, or a code of letters and digits.

    >>> phrase(np.random.default_rng(0))
    'H I B ZERO'
    """
    kinds = (_command, _spelled, _number, _code, _command_with_code)
    kind = kinds[int(random.choice(len(kinds), p=(0.15, 0.2, 0.2, 0.25, 0.2)))]
    return kind(random)


def _one_of(random: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(random.integers(len(words)))]


def _command(random: np.random.Generator) -> str:
    return _one_of(random, COMMANDS)


def _spelled(random: np.random.Generator) -> str:
    return " ".join(_one_of(random, NAMES))


def _number(random: np.random.Generator) -> str:
    tens = _one_of(random, TENS) + " " + _one_of(random, DIGITS[1:])
    if random.random() < 0.4:
        return tens
    hundred = _one_of(random, DIGITS[1:]) + " HUNDRED"
    return f"{hundred} {tens if random.random() < 0.5 else _one_of(random, TEENS)}"


def _code(random: np.random.Generator) -> str:
    letters = [LETTERS[int(i)] for i in random.integers(len(LETTERS), size=int(random.integers(2, 5)))]
    digits = [_one_of(random, DIGITS) for _ in range(int(random.integers(1, 3)))]
    return " ".join(letters + digits)


def _command_with_code(random: np.random.Generator) -> str:
    return f"{_command(random)} {_code(random)}"
