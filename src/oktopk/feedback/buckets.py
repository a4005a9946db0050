"""Names to places: which parameters make a bucket, and where each of them lies in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

DEFAULT_BUCKET_MB = 25.0
BucketPlan = str | float | Sequence[Sequence[str]]
"""How to make buckets: "model" (one of everything), a size in MB, or the names in each bucket."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced as one flat vector, in this order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """A step looks up each of its buckets many times."""
        return hash((self.names, self.sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.names, self.sizes)  # in another process strings have other hashes

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        stops = list(accumulate(self.sizes))
        starts = [0, *stops[:-1]]
        return {name: slice(start, stop) for name, start, stop in zip(self.names, starts, stops, strict=True)}

    @cached_property
    def filled(self) -> list[slice]:
        """The places that have entries."""
        return [place for place in self.places.values() if place.stop > place.start]

    @cached_property
    def starts(self) -> Tensor:
        """The first entries of those."""
        return torch.tensor([place.start for place in self.filled], dtype=torch.int64)

    def __str__(self) -> str:
        first, *rest = self.names
        return f"{first} … {rest[-1]} ({len(self.names)} parameters)" if rest else first


def make_buckets(
    sizes: Mapping[str, int], plan: BucketPlan = DEFAULT_BUCKET_MB, kinds: Mapping[str, Hashable] | None = None
) -> tuple[Bucket, ...]:
    """Buckets for parameters in the order of the model.

    By size they are filled from the last parameter to the first, as backward delivers gradients. Parameters of
    different kinds (types, devices) are never in one bucket.

    >>> [bucket.names for bucket in make_buckets({"a": 100, "b": 200, "c": 300}, plan=0.002)]
    [('c', 'b'), ('a',)]
    """
    if not sizes:
        raise ValueError("there are no parameters that require a gradient")
    kind_of = kinds or dict.fromkeys(sizes)
    return tuple(
        Bucket(tuple(names), tuple(sizes[name] for name in names))
        for together in _planned(sizes, plan)
        for names in _by_kind(together, kind_of)
    )


def _by_kind(names: Sequence[str], kind_of: Mapping[str, Hashable]) -> list[list[str]]:
    apart: dict[Hashable, list[str]] = {}
    for name in names:
        apart.setdefault(kind_of[name], []).append(name)
    return list(apart.values())


def _planned(sizes: Mapping[str, int], plan: BucketPlan) -> Iterable[Sequence[str]]:
    """The names that are to be together."""
    if plan == "model":
        return [list(sizes)]
    if isinstance(plan, (int, float)) and not isinstance(plan, bool) and plan > 0:
        return _fill(sizes, int(plan * 2**20))
    if isinstance(plan, str) or not isinstance(plan, Sequence):
        raise ValueError(f'buckets must be "model", a size in MB or lists of names, got {plan!r}')
    named = [name for names in plan for name in names]
    if sorted(named) != sorted(sizes):
        wrong = sorted(set(named) ^ set(sizes)) or sorted({name for name in named if named.count(name) > 1})
        raise ValueError(f"buckets must have every parameter once; look at {', '.join(wrong[:5])}")
    return plan


def _fill(sizes: Mapping[str, int], cap_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name in reversed(list(sizes)):
        if names and 4 * (held + sizes[name]) > cap_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += sizes[name]
    yield names


def cut(bucket: Bucket, cap_bytes: int) -> list[tuple[Bucket, slice]]:
    """Smaller buckets of the parameters that are neighbours in this one, and where they lie; the last come first.

    >>> [(piece.names, place) for piece, place in cut(Bucket(("a", "b", "c"), (100, 200, 300)), 2000)]
    [(('b', 'c'), slice(100, 600, None)), (('a',), slice(0, 100, None))]
    """
    sizes, pieces = dict(zip(bucket.names, bucket.sizes, strict=True)), []
    for names in _fill(sizes, cap_bytes):
        piece = Bucket(tuple(reversed(names)), tuple(sizes[name] for name in reversed(names)))
        pieces.append((piece, slice(bucket.places[names[-1]].start, bucket.places[names[0]].stop)))
    return pieces


def gather(bucket: Bucket, grads: Mapping[str, Tensor | None], flat: Tensor) -> None:
    """Lay the gradients into the flat vector; one that is missing counts as zeros."""
    for name, place in bucket.places.items():
        grad = grads.get(name)
        if grad is None:
            flat[place].zero_()
        elif grad.layout is not torch.strided:
            raise ValueError(f"{name} has a sparse gradient: use sparse=False in its layer, or call to_dense()")
        else:
            flat[place].view(grad.shape).copy_(grad)


def scatter(bucket: Bucket, flat: Tensor, grads: Mapping[str, Tensor | None]) -> None:
    """Copy the flat vector back into those gradients that there are."""
    for name, place in bucket.places.items():
        grad = grads.get(name)
        if grad is not None:
            grad.copy_(flat[place].view(grad.shape))


def layout_mismatch(saved: Iterable[Bucket], now: Mapping[str, int]) -> str | None:
    """Why a saved layout does not fit these parameters; None if it does."""
    before = dict(pair for bucket in saved for pair in zip(bucket.names, bucket.sizes, strict=True))
    missing = [name for name in before if name not in now]
    unknown = [name for name in now if name not in before]
    resized = [name for name, size in before.items() if now.get(name, size) != size]
    if not (missing or unknown or resized):
        return None
    parts = []
    for title, names in (
        ("only in the checkpoint", missing),
        ("only in the model", unknown),
        ("of another size", resized),
    ):
        if names:
            parts.append(f"{title}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}")
    return "the checkpoint belongs to another model; " + "; ".join(parts)
