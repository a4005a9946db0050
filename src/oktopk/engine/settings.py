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

AUTO = "auto"
"""As a density: chosen by measurement."""
DEFAULT_DENSITY, LONG_WARMUP = 0.01, 128
"""Where front ends are not given them; the warm-up is so long only where a density is given."""
LEAST_DENSITY, MOST_DENSITY = 0.01, 0.25
"""The range of densities that are chosen by measurement; `min_density` moves its lower end."""
WARMUP_VALUES = ("fp32", "fp16", "bf16")
Pairs = tuple[tuple[int, float | None], ...]
"""The density from each of these steps on, in their order; None is a dense step."""
Density = float | str | Sequence[tuple[int, float | None]]
"""What users may give as a density."""


class Options(TypedDict, total=False):
    """Settings beyond the main ones, which every front end takes as keywords; see Settings."""

    ramp_steps: int | None
    values: str | ValueCodec
    momentum: float
    dense: Sequence[str]
    dense_below: int
    max_skipped: int
    fusion_entries: int
    ranks_per_host: int
    budget: float
    min_density: float
    warmup_values: str
    total_steps: int | None


@dataclass(frozen=True)
class Settings:
    """How gradients are averaged; the same on all ranks. Front ends build it from their keywords.

    Attributes:
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object with parameters of its own.
        density: share of entries that each rank sends in a sparse step, in (0, 1]. "auto" chooses it by
            measurement, between `min_density` and 25 %: the largest one whose exposed communication stays within
            `budget`. A sequence of pairs (step, density), such as the `schedule` of a front end, gives the density
            from each step on, and None for dense steps: it decides every step after the warm-up alone, so that
            `ramp_steps` and `auto` have no effect.
        warmup_steps: number of dense steps before the sparse phase. None chooses it, and `ramp_steps` unless that
            is given, as a share of `total_steps`.
        ramp_steps: number of sparse steps over which the density falls from 25 % to `density`, or to `min_density`
            if that is "auto". None is 0 after a warm-up of given length, and otherwise chosen with it.
        values: format of values on the wire: fp32, bf16, fp16, e4m3 (8 bits), that of a plug-in, or a ValueCodec.
            The rounding error stays in the residual.
        momentum: factor of momentum correction with factor masking, as in Deep Gradient Compression; 0 is off. The
            optimizer must then have no momentum of its own.
        norm_clip: scale this rank's gradient down to this norm before it is compressed; None is off. The norm is
            that of the whole model, so that no bucket is exchanged before backward has ended.
        dense: patterns such as `"*.bias"`; parameters whose name matches one are always averaged densely.
        dense_below: parameters with fewer entries than this are always averaged densely, too.
        max_skipped: number of skipped steps in a row that raises NonFiniteError.
        fusion_entries: sparse buckets are fused, to share messages, until together they send this many entries.
            0 exchanges each bucket by itself, which hides more of the exchange behind a long backward pass.
        ranks_per_host: number of ranks on each host, numbered host by host. They are averaged inside the host, and
            one of them exchanges with the leaders of other hosts. With 1, every rank exchanges with every other.
        auto: measure dense and sparse steps, and use the faster way.
        budget: with density "auto", the exposed time that depends on the density, as a share of a step without it.
            Waiting for stragglers, latency and control messages do not count.
        min_density: the smallest density that "auto" may choose.
        warmup_values: format in which the dense steps of the warm-up are summed: fp32, or fp16 and bf16 for half
            the bytes. Only float32 gradients are converted; the rounding error is lost. In fp16, entries above
            32752 are clipped and those below 3e-8 · ranks vanish; bf16 has the range of fp32.
        total_steps: number of steps of the whole run, if `warmup_steps` is None; a run of unknown length is taken
            for a short one, of 500 steps.

    >>> from oktopk import ALGORITHMS
    >>> Settings(ALGORITHMS["oktopk"](), density=0.02).warmup_steps
    128
    """

    algorithm: Algorithm
    density: float | str | Pairs = DEFAULT_DENSITY
    warmup_steps: int | None = LONG_WARMUP
    ramp_steps: int | None = None
    values: str | ValueCodec = "fp16"
    momentum: float = 0.0
    norm_clip: float | None = None
    dense: tuple[str, ...] = ()
    dense_below: int = 0
    max_skipped: int = 25
    fusion_entries: int = 250_000
    ranks_per_host: int = 1
    auto: bool = False
    budget: float = 0.1
    min_density: float = LEAST_DENSITY
    warmup_values: str = "fp32"
    total_steps: int | None = None

    @classmethod
    def from_options(
        cls, algorithm: str | Algorithm, density: Density | None, warmup_steps: int | None,
        norm_clip: float | None, auto: bool, options: Options,
    ) -> Settings:  # fmt: skip
        """The settings that a front end was given as keywords.

        Without a density the warm-up is short, a share of the run. With one it is 128 dense steps, unless it or
        the length of the run is given.
        """
        chosen: dict[str, Any] = dict(options)
        if density is None:
            density = DEFAULT_DENSITY
        elif warmup_steps is None and isinstance(pairs := check_density(density), tuple):
            warmup_steps = next((step for step, share in pairs if share is not None), 0)
        elif warmup_steps is None and chosen.get("total_steps") is None:
            warmup_steps = LONG_WARMUP
        patterns = chosen.pop("dense", ())
        if not isinstance(patterns, Iterable) or isinstance(patterns, str):
            raise ValueError(f"dense must be a list of patterns such as ['*.bias'], got {patterns!r}")
        for name in sorted(set(chosen) - set(Options.__annotations__)):
            raise TypeError(f"unknown option {name!r}: {_hint(name, list(cls.__dataclass_fields__))}")
        return cls(
            find_algorithm(algorithm), density, warmup_steps,  # type: ignore[arg-type]
            norm_clip=norm_clip, auto=auto, dense=tuple(patterns), **chosen,
        )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density(self.density))
        self._check_counts()
        if isinstance(find_values(self.values), ValueCodec) and not self.algorithm.takes_plugins:
            raise ValueError(
                f"values: {self.algorithm.name} writes fp32, fp16, bf16 or e4m3, not those of a plug-in"
            )
        if self.warmup_values not in WARMUP_VALUES:
            raise ValueError(
                f"unknown warmup_values {self.warmup_values!r}: choose one of {', '.join(WARMUP_VALUES)}"
            )
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.norm_clip is not None and not (_is_number(self.norm_clip) and self.norm_clip > 0):
            raise ValueError(f"norm_clip must be above 0, got {self.norm_clip!r}; leave it out for no clipping")
        if not isinstance(self.auto, bool):
            raise ValueError(f"auto must be True or False, got {self.auto!r}")
        if not (_is_number(self.budget) and 0 < self.budget <= 1):
            raise ValueError(f"budget must be in (0, 1], got {self.budget!r}")
        if not (_is_number(self.min_density) and 0 < self.min_density <= MOST_DENSITY):
            raise ValueError(f"min_density must be in (0, {MOST_DENSITY}], got {self.min_density!r}")

    def _check_counts(self) -> None:
        least_of = dict.fromkeys(("warmup_steps", "ramp_steps", "dense_below", "fusion_entries"), 0)
        least_of |= dict.fromkeys(("max_skipped", "ranks_per_host", "total_steps"), 1)
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is None and name in ("warmup_steps", "ramp_steps", "total_steps"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    @property
    def fusion_density(self) -> float:
        """The density by which buckets are fused: the smallest one, so that groups outlast a change of density."""
        if isinstance(self.density, tuple):
            return min((density for _, density in self.density if density is not None), default=1.0)
        return self.min_density if isinstance(self.density, str) else self.density

    def always_dense(self, name: str, size: int) -> bool:
        """Whether a parameter is never compressed."""
        return size < self.dense_below or any(fnmatchcase(name, pattern) for pattern in self.dense)

    def terms(self) -> dict[str, object]:
        """What ranks must agree on."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"values": describe_values(self.values)}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_density(density: Any) -> float | str | Pairs:
    """Check a density that a user has given: a number, "auto", or pairs, which become tuples."""
    if _is_number(density) and 0 < density <= 1:
        return density  # type: ignore[no-any-return]
    if _is_number(density):
        raise ValueError(f"density must be in (0, 1], got {density!r}")
    if isinstance(density, str) and density == AUTO:
        return AUTO
    if isinstance(density, Sequence) and not isinstance(density, str):
        return check_pairs(density)
    raise ValueError(
        f"density must be in (0, 1], {AUTO!r}, or a sequence of pairs (step, density), got {density!r}"
    )


def check_pairs(pairs: Sequence[Any]) -> Pairs:
    """Check pairs (step, density) that a user or a file has given."""
    found: list[tuple[int, float | None]] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"density as a sequence must have pairs (step, density), got {pair!r}")
        step, density = pair
        if type(step) is not int or step < 0 or (found and step <= found[-1][0]):
            raise ValueError(f"density as a sequence must have steps that rise from 0 or later, got {pair!r}")
        if density is not None and not (_is_number(density) and 0 < density <= 1):
            raise ValueError(f"density as a sequence must have densities in (0, 1] or None, got {pair!r}")
        found.append((step, density))
    if not found:
        raise ValueError("density as a sequence must have at least one pair (step, density)")
    return tuple(found)


def _hint(name: str, fields: list[str]) -> str:
    known = [*fields, "buckets", "grad_scaler", "sinks", "timeout", "trainer"]
    if name == "compressor":
        return "it is called 'algorithm' here"
    return hint(name, known)
