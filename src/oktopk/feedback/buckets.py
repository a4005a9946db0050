"""Buckets: which parameters share one, and where each of them lies in its flat vector."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

DEFAULT_BUCKET_MB = 25.0
MISMATCH = "checkpoint does not match the model"
BucketPlan = str | float | Sequence[Sequence[str]]
"""How to form buckets: "model" (one bucket), a size in MB, or the parameter names of each bucket."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced as one flat vector, in this order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def places(self) -> dict[str, slice]:
        """The slice of the flat vector that each parameter takes."""
        stops = list(accumulate(self.sizes))
        starts = [0, *stops[:-1]]
        return {name: slice(start, stop) for name, start, stop in zip(self.names, starts, stops, strict=True)}

    @cached_property
    def filled(self) -> list[slice]:
        """The places that are not empty."""
        return [place for place in self.places.values() if place.stop > place.start]

    @cached_property
    def starts(self) -> Tensor:
        """The first index of each place in `filled`."""
        return torch.tensor([place.start for place in self.filled], dtype=torch.int64)

    def only(self, names: Collection[str]) -> Bucket:
        """The bucket of those of its parameters that are among `names`."""
        kept = [pair for pair in zip(self.names, self.sizes, strict=True) if pair[0] in names]
        return Bucket(tuple(name for name, _ in kept), tuple(size for _, size in kept))

    def __str__(self) -> str:
        first, *rest = self.names
        return f"{first} … {rest[-1]} ({len(self.names)} parameters)" if rest else first


def make_buckets(
    sizes: Mapping[str, int], plan: BucketPlan = DEFAULT_BUCKET_MB, kinds: Mapping[str, Hashable] | None = None
) -> tuple[Bucket, ...]:
    """Form buckets from parameters in model order.

    Buckets of a given size are filled from the last parameter to the first, the order in which backward computes
    gradients. Parameters of different kinds (dtype, device) never share a bucket.

    >>> [bucket.names for bucket in make_buckets({"a": 100, "b": 200, "c": 300}, plan=0.002)]
    [('c', 'b'), ('a',)]
    """
    if not sizes:
        raise ValueError("no parameter requires a gradient")
    kind_of = kinds or dict.fromkeys(sizes)
    return tuple(
        Bucket(tuple(names), tuple(sizes[name] for name in names))
        for together in _plan_names(sizes, plan)
        for names in _split_by_kind(together, kind_of)
    )


def check_plan(plan: BucketPlan | None) -> None:
    """Raise if this is no way to form buckets; None is DDP's own."""
    size = isinstance(plan, (int, float)) and not isinstance(plan, bool) and plan > 0
    names = isinstance(plan, Sequence) and not isinstance(plan, str)
    if not (plan is None or plan == "model" or size or names):
        raise ValueError(f'buckets must be "model", a size in MB or lists of names, got {plan!r}')


def _split_by_kind(names: Sequence[str], kind_of: Mapping[str, Hashable]) -> list[list[str]]:
    apart: dict[Hashable, list[str]] = {}
    for name in names:
        apart.setdefault(kind_of[name], []).append(name)
    return list(apart.values())


def _plan_names(sizes: Mapping[str, int], plan: BucketPlan) -> Iterable[Sequence[str]]:
    """The names of each bucket."""
    check_plan(plan)
    if isinstance(plan, str):
        return [list(sizes)]
    if isinstance(plan, (int, float)):
        return _fill_buckets(sizes, int(plan * 2**20))
    named = [name for names in plan for name in names]
    if sorted(named) != sorted(sizes):
        wrong = sorted(set(named) ^ set(sizes)) or sorted({name for name in named if named.count(name) > 1})
        raise ValueError(f"buckets must contain every parameter exactly once; check {', '.join(wrong[:5])}")
    return plan


def _fill_buckets(sizes: Mapping[str, int], cap_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name in reversed(list(sizes)):
        if names and 4 * (held + sizes[name]) > cap_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += sizes[name]
    yield names


def flatten(bucket: Bucket, grads: Mapping[str, Tensor | None], flat: Tensor) -> None:
    """Copy the gradients into the flat vector. A missing gradient counts as zeros."""
    for name, place in bucket.places.items():
        grad = grads.get(name)
        if grad is None:
            flat[place].zero_()
        elif grad.layout is not torch.strided:
            raise ValueError(
                f"unsupported sparse gradient in {name}: use sparse=False in its layer, or call to_dense()"
            )
        else:
            flat[place].view(grad.shape).copy_(grad)


def unflatten(bucket: Bucket, flat: Tensor, grads: Mapping[str, Tensor | None]) -> None:
    """Copy the flat vector back into the gradients that exist."""
    for name, place in bucket.places.items():
        grad = grads.get(name)
        if grad is not None:
            grad.copy_(flat[place].view(grad.shape))


def layout_mismatch(saved: Iterable[Bucket], now: Mapping[str, int]) -> str | None:
    """Say why saved buckets do not match these parameters (name to size); None if they do."""
    before = dict(pair for bucket in saved for pair in zip(bucket.names, bucket.sizes, strict=True))
    differences = {
        "only in the checkpoint": [name for name in before if name not in now],
        "only in the model": [name for name in now if name not in before],
        "size mismatch": [name for name, size in before.items() if now.get(name, size) != size],
    }
    parts = [
        f"{title}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
        for title, names in differences.items()
        if names
    ]
    return f"{MISMATCH}: {'; '.join(parts)}" if parts else None
