"""The kinds of values that options have: functions that parse one, or say in a ValueError what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from oktopk.engine.settings import AUTO, Pairs, check_pairs
from oktopk.utils.registry import PluginError, Registry

_DENSE = "dense"
ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def integer(least: int, up_to: float = inf) -> Callable[[Any], int]:
    wanted = f"a whole number from {least} " + ("on" if up_to == inf else f"up to {up_to}")

    def parse(value: Any) -> int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(wanted)
        found: int = _convert(int, value, wanted)
        if found >= 2**63:
            raise ValueError("a number below 2^63")
        if not least <= found <= up_to:
            raise ValueError(wanted)
        return found

    parse.__name__ = "int"
    return parse


def number(above: float = -inf, up_to: float = inf, least: float = -inf) -> Callable[[Any], float]:
    bounds = [f"above {above:g}"] * (above > -inf) + [f"from {least:g} on"] * (least > -inf)
    wanted = " ".join(["a number", *bounds, *[f"up to {up_to:g}"] * (up_to < inf)])

    def parse(value: Any) -> float:
        found: float = inf if isinstance(value, bool) else _convert(float, value, wanted)
        if not (above < found <= up_to and least <= found < inf):
            raise ValueError(wanted)
        return found

    parse.__name__ = "float"
    return parse


def _convert(kind: Callable[[Any], Any], value: Any, wanted: str) -> Any:
    try:
        return kind(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(wanted) from error


def switch(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in ON + OFF:
        raise ValueError("True or False")
    return text in ON


def path(value: Any) -> Path:
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path without a zero byte")
    found: Path = _convert(Path, value, "a path")
    return found


path.__name__ = "Path"


def or_auto(parse_number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Parses "auto", or a number."""

    def parse(value: Any) -> Any:
        if str(value).strip().lower() == AUTO:
            return AUTO
        try:
            return parse_number(value)
        except ValueError as error:
            raise ValueError(f"{error}, or {AUTO}") from error

    parse.__name__ = parse_number.__name__
    return parse


def density(value: Any) -> float | str:
    """A number, "auto", or steps with their densities as text."""
    if ":" in str(value):
        try:
            return format_schedule(parse_schedule(str(value)))
        except ValueError as error:
            raise ValueError(f"a number, auto, or steps with densities like 0:dense,128:0.01 ({error})") from error
    found: float | str = or_auto(number(above=0, up_to=1))(value)
    return found


density.__name__ = "float"


def parse_schedule(text: str) -> Pairs:
    """Parse steps with their densities.

    >>> parse_schedule("0:dense,128:0.01")
    ((0, None), (128, 0.01))
    """
    pairs = [word.split(":") for word in text.lower().split(",")]
    return check_pairs([(int(step), None if found.strip() == _DENSE else float(found)) for step, found in pairs])


def format_schedule(pairs: Iterable[tuple[int, float | None]]) -> str:
    """Write steps with their densities as --density takes them."""
    return ",".join(f"{step}:{_DENSE if found is None else repr(float(found))}" for step, found in pairs)


class OneOf:
    """Parses a name; those of plug-ins are looked for when it is none of oktopk's own."""

    __name__ = "str"

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def __call__(self, value: Any) -> str:
        for word in (str(value), str(value).lower()):
            if word in self._names:
                return word
        if isinstance(self._names, Registry) and isinstance(error := self._names.problem(str(value)), PluginError):
            raise error
        raise ValueError(f"one of {', '.join(self.known())}")

    def known(self) -> list[str]:
        return self._names.names() if isinstance(self._names, Registry) else list(self._names)


class ListOf(OneOf):
    """Parses names that commas separate."""

    def __call__(self, value: Any) -> str:
        names = [OneOf.__call__(self, word.strip()) for word in str(value).split(",")]
        return ",".join(dict.fromkeys(names))
