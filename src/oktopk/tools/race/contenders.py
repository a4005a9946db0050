"""The contenders by name: PyTorch's own, and ours with any settings.

    ddp   ddp-fp16   ddp-bf16   powersgd:4   accumulate:4:lr=2   oktopk:density=0.05:values=fp16:auto=False
    local:density=0.01:average_state_every=50   hsdp-native:2   hsdp:2:density=0.01   local:shards=2
    oktopk:density=auto:budget=0.2:warmup_steps=None:total_steps=500:warmup_values=fp16

A new front end is a new kind: an entry of TORCH here, and of `attach.ATTACH`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

from oktopk.algorithms import ALGORITHMS, Algorithm
from oktopk.engine.autotune import Schedule
from oktopk.engine.settings import AUTO, Options, Settings
from oktopk.frontends.ddp import OkTopkState
from oktopk.frontends.local import LocalOptimizer
from oktopk.tools.hooks import BF16, DDP, FP16, HOOKS, POWERSGD
from oktopk.tools.key_values import SettingError, parse_setting
from oktopk.utils.names import hint
from oktopk.utils.registry import PluginError
from oktopk.wire.codecs import VALUE_CODES

from .spec import RaceError

ACCUMULATE, OURS, LOCAL, HSDP, NATIVE = "accumulate", "ours", "local", "hsdp", "hsdp-native"
TORCH = (DDP, FP16, BF16, POWERSGD, ACCUMULATE, NATIVE)
"""What the name of a contender begins with, unless it is one of our algorithms, LOCAL or HSDP."""
_SHARDS = 2
_LR, _START, _BUCKETS, _PATTERNS, _ALGORITHM, _SHARDED = "lr", "start", "buckets", "dense", "algorithm", "shards"
_STATE_EVERY, _STATE = "average_state_every", "averaged_state"
OF_LOCAL = (_STATE_EVERY, _STATE, "local_parameters", "lr_scale")
"""Settings of a LocalOptimizer only."""
_NOT_LOCAL = ("momentum", "norm_clip")
_MAIN = ("density", "warmup_steps", "norm_clip", "auto")
_DEFAULTS = {
    kind: {name: known.default for name, known in inspect.signature(front).parameters.items() if name in _MAIN}
    for kind, front in ((OURS, OkTopkState), (LOCAL, LocalOptimizer), (HSDP, OkTopkState))
}
POWERSGD_START = 20


@dataclass(frozen=True)
class Contender:
    """A contender as its name describes it."""

    name: str
    kind: str
    """A name of torch's hooks, `accumulate`, NATIVE, OURS or HSDP (gradients are averaged), or LOCAL (updates)."""
    shards: int = 1
    """Ranks of a replica, of a sharded model."""
    rank: int = 1
    """Rank of PowerSGD."""
    passes: int = 1
    """Batches per step: gradient accumulation."""
    lr: float = 1.0
    """Factor of the learning rate."""
    warmup_steps: int = 0
    """Dense steps before compression."""
    algorithm: Algorithm | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of OkTopkState, FsdpState or LocalOptimizer."""

    @property
    def settings(self) -> Settings | None:
        """The settings of one of ours; None for torch's."""
        if self.algorithm is None:
            return None
        given = {**_DEFAULTS[self.kind], **self.options, "warmup_steps": self.warmup_steps}
        main = {name: given.pop(name, None) for name in _MAIN}
        for name in (_BUCKETS, *OF_LOCAL):
            given.pop(name, None)
        return Settings.from_options(self.algorithm, options=cast(Options, given), **main)

    @property
    def follows_link(self) -> bool:
        """Whether its steps depend on the link: dense or sparse, or the density, by measurement."""
        return self.settings is not None and (self.settings.auto or self.settings.density == AUTO)

    def with_warmup(self, most: int) -> Contender:
        """The same with at most so many dense steps before compression, to time both phases in few steps."""
        return replace(self, warmup_steps=min(self.warmup_steps, most))


def parse_contender(text: str) -> Contender:
    """Parse the name of a contender.

    >>> parse_contender("accumulate:4:lr=2").passes
    4
    >>> parse_contender("oktopk:density=0.05:values=fp16").settings.values
    'fp16'
    """
    head, *words = text.strip().split(":")
    if head not in (*TORCH, LOCAL, HSDP) and head not in ALGORITHMS:
        problem = ALGORITHMS.problem(head)
        if isinstance(problem, PluginError):
            raise RaceError(str(problem)) from problem
        raise RaceError(f"unknown contender {head!r}: {hint(head, [*TORCH, *ALGORITHMS.names(), LOCAL, HSDP])}")
    counts = [word for word in words if "=" not in word]
    try:
        given = dict(parse_setting(word, _known_keys(head)) for word in words if "=" in word)
    except SettingError as error:
        raise RaceError(f"{text}: {error}") from error
    lr = _positive(text, _LR, given.pop(_LR, 1.0))
    if head == HSDP:
        kind, shards = HSDP, _shards(text, counts)
        return replace(_parse_ours(text, kind, _algorithm(text, head, given), lr, given), shards=shards)
    if head in ALGORITHMS or head == LOCAL:
        if counts:
            more = f"; did you mean values={counts[0]}?" if counts[0] in VALUE_CODES else ""
            raise RaceError(f"{text}: settings have the form key=value, got {counts[0]!r}{more}")
        shards = _whole(text, _SHARDED, given.pop(_SHARDED, 1), 1)
        kind = LOCAL if head == LOCAL else OURS
        return replace(_parse_ours(text, kind, _algorithm(text, head, given), lr, given), shards=shards)
    if head == NATIVE:
        return Contender(text, head, lr=lr, shards=_shards(text, counts))
    if len(counts) > (head in (POWERSGD, ACCUMULATE)):
        raise RaceError(f"{text}: {counts[-1]!r} is not understood; settings have the form key=value")
    if head in HOOKS:
        return Contender(text, head, lr=lr)
    if head == POWERSGD:
        start = _whole(text, "start", given.pop(_START, POWERSGD_START), 2)
        return Contender(
            text, head, rank=_whole(text, "the rank", (counts or ["1"])[0], 1), lr=lr, warmup_steps=start
        )
    passes = _whole(text, "the number of batches per step", (counts or ["none"])[0], 2)
    return Contender(text, head, passes=passes, lr=lr)


def _shards(text: str, counts: list[str]) -> int:
    if len(counts) > 1:
        raise RaceError(f"{text}: {counts[-1]!r} is not understood; settings have the form key=value")
    return _whole(text, "the number of shards", (counts or [str(_SHARDS)])[0], 1)


def _algorithm(text: str, head: str, given: dict[str, Any]) -> Algorithm:
    """The algorithm of one of ours: its name is the contender's, or a setting of a local one."""
    name = str(given.pop(_ALGORITHM, "oktopk")) if head in (LOCAL, HSDP) else head
    if name not in ALGORITHMS:
        raise RaceError(f"{text}: unknown algorithm {name!r}: {hint(name, ALGORITHMS.names())}")
    return ALGORITHMS[name]()


def _parse_ours(text: str, kind: str, algorithm: Algorithm, lr: float, given: dict[str, Any]) -> Contender:
    own = {name: given.pop(name) for name in _constants(algorithm) if name in given}
    for name, value in own.items():
        default = getattr(algorithm, name)
        if isinstance(default, (int, float)) and not _is_like(value, default):
            raise RaceError(f"{text}: {name} must be a number like {default}, got {value!r}")
    for name in (_PATTERNS, _STATE):
        if isinstance(given.get(name), str):
            given[name] = given[name].split("+")
    warmup = given.pop("warmup_steps", _DEFAULTS[kind]["warmup_steps"])
    if given.get(_STATE_EVERY) is not None:
        _whole(text, _STATE_EVERY, given[_STATE_EVERY], 1)
    try:
        algorithm = replace(algorithm, **own)
        contender = Contender(text, kind, lr=lr, warmup_steps=warmup, algorithm=algorithm, options=given)
        assert contender.settings is not None
        if warmup is None:  # by the rule, as numbers
            schedule = Schedule.of(contender.settings)
            options = {**given, "ramp_steps": schedule.ramp_steps}
            contender = replace(contender, warmup_steps=schedule.warmup_steps, options=options)
    except (ValueError, TypeError, PluginError) as error:
        raise RaceError(f"{text}: {error}") from error
    return contender


def _constants(algorithm: Algorithm) -> list[str]:
    """The fields of the algorithm itself, such as tau."""
    return [item.name for item in fields(algorithm) if item.init] if is_dataclass(algorithm) else []


def _is_like(value: object, default: float) -> bool:
    kind = int if isinstance(default, int) else (int, float)
    return isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)


def _known_keys(head: str) -> list[str]:
    settings = [item.name for item in fields(Settings) if item.name != _ALGORITHM]
    if head in ALGORITHMS:
        return [_LR, *settings, _BUCKETS, *_constants(ALGORITHMS[head]())]
    if head in (LOCAL, HSDP):
        constants = {name: None for algorithm in ALGORITHMS.values() for name in _constants(algorithm())}
        if head == HSDP:
            return [_LR, _ALGORITHM, *settings, *constants]
        useful = [name for name in settings if name not in _NOT_LOCAL]
        return [_LR, _ALGORITHM, _SHARDED, *useful, _BUCKETS, *OF_LOCAL, *constants]
    return [_LR, _START] if head == POWERSGD else [_LR]


def _positive(text: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise RaceError(f"{text}: {name} must be a number above 0, got {value!r}")
    return float(value)


def _whole(text: str, name: str, value: Any, least: int) -> int:
    if not str(value).isdecimal() or int(value) < least:
        raise RaceError(f"{text}: {name} must be a whole number from {least} on, got {value}")
    return int(value)
