"""What the user can set, checked, in one place for all front ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypedDict

from ..algorithms import Algorithm, Dense, find_algorithm
from ..wire.message import VALUE_CODES
from .schedule import Schedule


class Options(TypedDict, total=False):
    """Settings beyond the main ones, which every front end takes as keywords; see Settings."""

    ramp_steps: int
    values: str
    momentum: float
    dense: Sequence[str]
    dense_below: int
    max_skipped: int
    join: int
    ranks_per_host: int


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced; the same on all ranks.

    algorithm      a name of oktopk.ALGORITHMS, or an algorithm with settings of its own
    density        the share of entries to send, in (0, 1]
    warmup_steps   that many steps are dense before the sparse phase
    ramp_steps     that many sparse steps come down from a density of 25 % to the one asked for
    values         fp32, bf16, fp16 or e4m3 (8 bits) on the wire; what rounding loses stays in the residual
    momentum       momentum correction with factor masking (as in Deep Gradient Compression); the optimizer must
                   then have no momentum of its own
    norm_clip      scale this rank's gradient down to that norm before it is compressed; the norm is that of the
                   whole model, so reductions start only when backward has ended
    dense          parameters whose name matches one of these patterns (like "*.bias") always go dense
    dense_below    so do those with fewer entries
    max_skipped    that many skipped steps in a row are an error
    join           sparse buckets share their messages until so many entries are selected: it costs fewer rounds;
                   0 lets each go by itself, which hides more of the exchange behind a long backward
    ranks_per_host so many ranks, numbered host by host, average in the memory of their host, and the first of
                   them exchanges with those of other hosts; 1 lets every rank exchange with all others
    auto           time both ways and keep the faster one for each bucket
    """

    algorithm: Algorithm
    density: float = 0.01
    warmup_steps: int = 128
    ramp_steps: int = 0
    values: str = "fp32"
    momentum: float = 0.0
    norm_clip: float | None = None
    dense: tuple[str, ...] = ()
    dense_below: int = 0
    max_skipped: int = 25
    join: int = 250_000
    ranks_per_host: int = 1
    auto: bool = False

    @classmethod
    def of(
        cls,
        algorithm: str | Algorithm,
        density: float,
        warmup_steps: int,
        norm_clip: float | None,
        auto: bool,
        options: Options,
    ) -> Settings:
        chosen: dict[str, Any] = dict(options)
        patterns = chosen.pop("dense", ())
        if isinstance(patterns, str):
            raise ValueError(f"dense must be a list of patterns like ['*.bias'], got {patterns!r}")
        for name in sorted(set(chosen) - set(Options.__annotations__)):
            raise TypeError(f"unknown option {name!r}: {_hint(name, list(cls.__dataclass_fields__))}")
        return cls(
            find_algorithm(algorithm),
            density,
            warmup_steps,
            norm_clip=norm_clip,
            auto=auto,
            dense=tuple(patterns),
            **chosen,
        )

    def __post_init__(self) -> None:
        number = isinstance(self.density, (int, float)) and not isinstance(self.density, bool)
        if not number or not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density!r}")
        for name, least in (
            ("warmup_steps", 0),
            ("ramp_steps", 0),
            ("dense_below", 0),
            ("max_skipped", 1),
            ("join", 0),
            ("ranks_per_host", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        if self.values not in VALUE_CODES:
            raise ValueError(f"unknown value format {self.values!r}: choose one of {', '.join(VALUE_CODES)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.norm_clip is not None and not self.norm_clip > 0:
            raise ValueError(f"norm_clip must be positive or None, got {self.norm_clip!r}")

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.density, self.warmup_steps, self.ramp_steps)

    @property
    def by_the_clock(self) -> bool:
        """Whether the clock chooses how to sum. The algorithm `dense` has no choice: it sums as DDP does."""
        return self.auto and not isinstance(self.algorithm, Dense)

    def always_dense(self, name: str, size: int) -> bool:
        return size < self.dense_below or any(fnmatchcase(name, pattern) for pattern in self.dense)

    def terms(self) -> dict[str, object]:
        """What ranks must agree on."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _hint(name: str, fields: list[str]) -> str:
    if name in ("algorithm", "compressor"):
        return f"here it is called {'compressor' if name == 'algorithm' else 'algorithm'!r}"
    known = [*fields, "buckets", "grad_scaler", "sinks", "timeout", "trainer"]
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
