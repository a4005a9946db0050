"""Who can take part, by name: PyTorch's own ways, ours with their variants, and the limits of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oktopk.algorithms import ALGORITHMS
from oktopk.engine.choice import TRIAL
from oktopk.engine.settings import Settings
from oktopk.errors import OkTopkError
from oktopk.wire.message import VALUE_CODES

BACKWARD, DDP, FP16, BF16, POWERSGD = "backward", "ddp", "ddp-fp16", "ddp-bf16", "powersgd"
MEMORY, LINK = "limit-memory", "limit-link"
REFERENCES = (BACKWARD, DDP, MEMORY)
"""What others are compared with: the floor, what one would do without any of this, and one pass over memory."""
CONTENDERS = {
    BACKWARD: "backward alone: nothing is sent",
    DDP: "DDP as it is",
    FP16: "DDP with torch's fp16_compress_hook",
    BF16: "DDP with torch's bf16_compress_hook",
    POWERSGD: "DDP with torch's powerSGD_hook, rank 1, one bucket",
    **{name: f"DDP with the hook of oktopk, {name}" for name in ALGORITHMS},
    MEMORY: "one pass over memory, without backward: residual += gradient",
    LINK: "the bytes of each sparse one of ours over the link and nothing else, without backward",
}
AUTO, HOSTS = "auto", "hosts"
GROUPS = {"join": 1_000_000_000, "apart": 0}
"""How many selected entries the buckets of a group have: all, or those of one bucket."""
VARIANTS = (*VALUE_CODES, AUTO, *GROUPS, HOSTS)
AUTO_DENSE = 14
"""Dense steps that `auto` has for its comparison; DDP arranges its buckets anew after the first, and then the ways
of small sums are tried."""
_WARMUP = 3


class BenchError(OkTopkError, ValueError):
    """Something that cannot be measured."""


@dataclass(frozen=True)
class Ours:
    """One of our own contenders."""

    algorithm: str
    values: str
    auto: bool = False
    join: int = Settings.join
    hosts: bool = False
    """The ranks of a host act as one."""

    @property
    def sparse(self) -> bool:
        """In every step that counts."""
        return self.algorithm != "dense" and not self.auto


def ours(name: str, values: str = "fp32") -> Ours | None:
    """What the name of one of our own contenders says; None if it is somebody else's.

    >>> ours("oktopk:fp16:apart")
    Ours(algorithm='oktopk', values='fp16', auto=False, join=0, hosts=False)
    >>> ours("topka:auto", values="bf16")
    Ours(algorithm='topka', values='bf16', auto=True, join=250000, hosts=False)
    """
    algorithm, *variants = name.split(":")
    if algorithm not in ALGORITHMS:
        return None
    for variant in variants:
        if variant not in VARIANTS:
            raise BenchError(f"unknown variant {variant!r} of {algorithm}: choose from {', '.join(VARIANTS)}")
    formats = [variant for variant in variants if variant in VALUE_CODES]
    if len(formats) > 1:
        raise BenchError(f"{name!r} has {len(formats)} value formats: give one")
    if len(set(GROUPS) & set(variants)) > 1:
        raise BenchError(f"{name!r} has two ways to group buckets: give one")
    join = next((GROUPS[variant] for variant in variants if variant in GROUPS), Settings.join)
    return Ours(algorithm, formats[0] if formats else values, AUTO in variants, join, HOSTS in variants)


def limited(name: str) -> str | None:
    """Whose bytes a link limit sends.

    >>> limited("limit-link:oktopk:fp16")
    'oktopk:fp16'
    """
    limit, _, whose = name.partition(":")
    return whose if limit == LINK and whose else None


def check_name(name: str) -> None:
    whose = limited(name)
    found = ours(name if whose is None else whose)
    if (found is None and (whose is not None or name not in CONTENDERS)) or name == LINK:
        raise BenchError(f"unknown contender {name!r}: choose from {', '.join(CONTENDERS)}")


def with_link_limits(names: Iterable[str]) -> list[str]:
    """Instead of `limit-link` one for each of ours that goes sparse, right behind it.

    >>> with_link_limits(["limit-link", "ddp", "dense", "oktopk:fp16", "topka:auto"])
    ['ddp', 'dense', 'oktopk:fp16', 'limit-link:oktopk:fp16', 'topka:auto']
    """
    asked = list(names)
    if LINK not in asked:
        return asked
    found: list[str] = []
    for name in (name for name in asked if name != LINK):
        one = ours(name)
        found += [name, f"{LINK}:{name}"] if one is not None and one.sparse else [name]
    return found


def warmup(name: str) -> int:
    """Steps that do not count: kernels are compiled, DDP arranges its buckets anew after the first, PowerSGD
    begins with the third, thresholds are found exactly in the first one of a bucket, `auto` times both ways."""
    one = ours(name)
    return AUTO_DENSE + TRIAL if one is not None and one.auto else _WARMUP
