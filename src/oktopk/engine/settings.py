"""What the user can set, validated, in one place for all front ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypedDict

from ..algorithms import Algorithm, find_algorithm
from ..utils.names import hint
from ..wire.codecs import ValueCodec, describe_values, find_values

GRADIENTS, UPDATES = "gradients", "updates"
"""What ranks average: gradients, or what each rank's optimizer would add to the parameters."""


class Options(TypedDict, total=False):
    """Settings beyond the main ones, which every front end takes as keywords; see Settings."""

    ramp_steps: int
    values: str | ValueCodec
    momentum: float
    dense: Sequence[str]
    dense_below: int
    max_skipped: int
    fusion_entries: int
    ranks_per_host: int


@dataclass(frozen=True)
class Settings:
    """How gradients are averaged; the same on all ranks. Front ends build it from their keywords.

    Attributes:
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object with parameters of its own.
        density: share of entries that each rank sends in a sparse step, in (0, 1].
        warmup_steps: number of dense steps before the sparse phase.
        ramp_steps: number of sparse steps over which the density falls from 25 % to `density`.
        values: format of values on the wire: fp32, bf16, fp16, e4m3 (8 bits), that of a plug-in, or a ValueCodec.
            The rounding error stays in the residual.
        momentum: factor of momentum correction with factor masking, as in Deep Gradient Compression; 0 is off. The
            optimizer must then have no momentum of its own.
        norm_clip: scale this rank's gradient down to this norm before it is compressed; None is off. The norm is
            that of the whole model, so that no bucket is exchanged before backward has ended.
        dense: patterns such as "*.bias"; parameters whose name matches one are always averaged densely.
        dense_below: parameters with fewer entries than this are always averaged densely, too.
        max_skipped: number of skipped steps in a row that raises NonFiniteError.
        fusion_entries: sparse buckets are fused, to share messages, until together they send this many entries.
            0 exchanges each bucket by itself, which hides more of the exchange behind a long backward pass.
        ranks_per_host: number of ranks on each host, numbered host by host. They are averaged inside the host, and
            one of them exchanges with the leaders of other hosts. With 1, every rank exchanges with every other.
        auto: measure dense and sparse steps, and use the faster way.

    >>> from oktopk import ALGORITHMS
    >>> Settings(ALGORITHMS["oktopk"](), density=0.02).warmup_steps
    128
    """

    algorithm: Algorithm
    density: float = 0.01
    warmup_steps: int = 128
    ramp_steps: int = 0
    values: str | ValueCodec = "fp32"
    momentum: float = 0.0
    norm_clip: float | None = None
    dense: tuple[str, ...] = ()
    dense_below: int = 0
    max_skipped: int = 25
    fusion_entries: int = 250_000
    ranks_per_host: int = 1
    auto: bool = False

    @classmethod
    def from_options(
        cls, algorithm: str | Algorithm, density: float, warmup_steps: int, norm_clip: float | None, auto: bool,
        options: Options,
    ) -> Settings:  # fmt: skip
        """The settings that a front end was given as keywords."""
        chosen: dict[str, Any] = dict(options)
        patterns = chosen.pop("dense", ())
        if not isinstance(patterns, Iterable) or isinstance(patterns, str):
            raise ValueError(f"dense must be a list of patterns such as ['*.bias'], got {patterns!r}")
        for name in sorted(set(chosen) - set(Options.__annotations__)):
            raise TypeError(f"unknown option {name!r}: {_hint(name, list(cls.__dataclass_fields__))}")
        return cls(
            find_algorithm(algorithm), density, warmup_steps,
            norm_clip=norm_clip, auto=auto, dense=tuple(patterns), **chosen,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not _is_number(self.density) or not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density!r}")
        least_of = dict.fromkeys(("warmup_steps", "ramp_steps", "dense_below", "fusion_entries"), 0)
        for name, least in {**least_of, "max_skipped": 1, "ranks_per_host": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        find_values(self.values)
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.norm_clip is not None and not (_is_number(self.norm_clip) and self.norm_clip > 0):
            raise ValueError(f"norm_clip must be above 0, got {self.norm_clip!r}; leave it out for no clipping")
        if not isinstance(self.auto, bool):
            raise ValueError(f"auto must be True or False, got {self.auto!r}")

    def always_dense(self, name: str, size: int) -> bool:
        """Whether a parameter is never compressed."""
        return size < self.dense_below or any(fnmatchcase(name, pattern) for pattern in self.dense)

    def terms(self) -> dict[str, object]:
        """What ranks must agree on."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"values": describe_values(self.values)}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _hint(name: str, fields: list[str]) -> str:
    known = [*fields, "buckets", "grad_scaler", "sinks", "timeout", "trainer"]
    if name == "compressor":
        return "it is called 'algorithm' here"
    return hint(name, known)
