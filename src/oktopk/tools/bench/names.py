"""The names of the contenders: PyTorch's own averaging, our algorithms with variants, and lower limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.autotune import TRIAL
from oktopk.engine.density.model import WINDOW
from oktopk.engine.settings import AUTO as MEASURED
from oktopk.engine.settings import Settings
from oktopk.errors import OkTopkError
from oktopk.tools.hooks import BF16, DDP, FP16, POWERSGD
from oktopk.tools.key_values import parse_setting
from oktopk.utils.names import hint
from oktopk.utils.registry import PluginError
from oktopk.wire.codecs import VALUE_CODES

BACKWARD, MEMORY, LINK = "backward", "limit-memory", "limit-link"
REFERENCES = (BACKWARD, DDP, MEMORY)
"""References for all others: backward alone, plain DDP, and one pass over memory."""
TORCH = (DDP, FP16, BF16, POWERSGD)
"""PyTorch's own ways to average."""
AUTO, HOSTS = "auto", "hosts"
FUSION = {"fused": 1_000_000_000, "apart": 0}
"""Selected entries up to which buckets share messages: all buckets, or each bucket apart."""
AUTO_DENSE = 14
"""Dense steps for the comparison of `auto`; DDP rebuilds its buckets after the first of them."""
_WARMUP = 3
_SETTLING = 4 * WINDOW
"""Sparse steps that density=auto gets to find its density."""
_KEYS = [
    item.name
    for item in fields(Settings)
    if item.name not in ("algorithm", "values", "auto", "fusion_entries", "ranks_per_host")
]
"""Settings that are written as key=value; the others have variants of their own."""


class BenchError(OkTopkError, ValueError):
    """A measurement that is not possible."""


def list_contenders(algorithms: Iterable[str] = ALGORITHMS) -> list[str]:
    """All contenders: backward alone, PyTorch's ways, algorithms with those of plug-ins, and lower limits.

    By default only plug-ins that can be used, which imports them.
    """
    return [BACKWARD, *TORCH, *algorithms, MEMORY, LINK]


def list_variants() -> list[str]:
    """All variants of our algorithms: value formats, and ways to exchange."""
    return [*VALUE_CODES.names(), AUTO, *FUSION, HOSTS]


@dataclass(frozen=True)
class OwnContender:
    """One of our algorithms with its variants."""

    algorithm: str
    values: str
    auto: bool = False
    fusion_entries: int = Settings.fusion_entries
    hosts: bool = False
    """Whether the ranks of a host exchange as one."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Other settings, by name."""

    @property
    def sparse(self) -> bool:
        """Whether every timed step is sparse."""
        return self.algorithm != "dense" and not self.auto


def parse_contender(name: str, values: str = "fp32") -> OwnContender | None:
    """Parse the name of one of our algorithms and its variants; None for any other contender.

    >>> parse_contender("oktopk:fp16:apart")
    OwnContender(algorithm='oktopk', values='fp16', auto=False, fusion_entries=0, hosts=False)
    >>> parse_contender("topka:auto", values="bf16")
    OwnContender(algorithm='topka', values='bf16', auto=True, fusion_entries=250000, hosts=False)
    """
    algorithm, *words = name.split(":")
    if algorithm not in ALGORITHMS:
        return None
    variants = [word for word in words if "=" not in word]
    options = _parse_options(name, [word for word in words if "=" in word])
    for variant in variants:
        if variant not in VALUE_CODES and variant not in (AUTO, *FUSION, HOSTS):
            raise BenchError(f"unknown variant {variant!r} of {algorithm}: {hint(variant, list_variants())}")
    formats = [variant for variant in variants if variant in VALUE_CODES]
    if len(formats) > 1:
        raise BenchError(f"{name!r} has {len(formats)} value formats: pass one")
    if len(set(FUSION) & set(variants)) > 1:
        raise BenchError(f"{name!r} is both fused and apart: pass one")
    fusion = next((FUSION[variant] for variant in variants if variant in FUSION), Settings.fusion_entries)
    used = formats[0] if formats else values
    return OwnContender(algorithm, used, AUTO in variants, fusion, HOSTS in variants, options)


def _parse_options(name: str, words: Iterable[str]) -> dict[str, Any]:
    """Parse settings that are written as key=value, and check them."""
    try:
        options = dict(parse_setting(word, _KEYS) for word in words)
        Settings(ALGORITHMS["oktopk"](), **options)
    except (ValueError, TypeError) as error:
        raise BenchError(f"{name}: {error}") from error
    return options


def link_limit_target(name: str) -> str | None:
    """The contender whose bytes a link limit sends; None for any other name.

    >>> link_limit_target("limit-link:oktopk:fp16")
    'oktopk:fp16'
    """
    limit, _, target = name.partition(":")
    return target if limit == LINK and target else None


def check_name(name: str) -> None:
    target = link_limit_target(name)
    found = parse_contender(name if target is None else target)
    if found is not None or (target is None and name in (BACKWARD, *TORCH, MEMORY)):
        return
    problem = ALGORITHMS.problem(name.partition(":")[0])
    if isinstance(problem, PluginError):
        raise BenchError(str(problem)) from problem
    raise BenchError(f"unknown contender {name!r}: {hint(name, list_contenders(ALGORITHMS.names()))}")


def add_link_limits(names: Iterable[str]) -> list[str]:
    """Replace `limit-link` by one link limit after each sparse algorithm.

    >>> add_link_limits(["limit-link", "ddp", "dense", "oktopk:fp16", "topka:auto"])
    ['ddp', 'dense', 'oktopk:fp16', 'limit-link:oktopk:fp16', 'topka:auto']
    """
    requested = list(names)
    if LINK not in requested:
        return requested
    found: list[str] = []
    for name in (name for name in requested if name != LINK):
        one = parse_contender(name)
        found += [name, f"{LINK}:{name}"] if one is not None and one.sparse else [name]
    return found


def warmup_steps(name: str) -> int:
    """Number of untimed steps: kernels compile, DDP rebuilds its buckets after the first, PowerSGD starts with the
    third, the first step of a bucket evaluates thresholds exactly, `auto` times dense and sparse, and density=auto
    finds its density."""
    one = parse_contender(name)
    if one is None:
        return _WARMUP
    return (AUTO_DENSE + TRIAL if one.auto else _WARMUP) + _SETTLING * (one.options.get("density") == MEASURED)
