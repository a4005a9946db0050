"""Choose the samples of each rank and step, as a function of the seed, the epoch and the step only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problems import DataError

_JITTER = 0.15
"""Relative noise added to lengths before sorting, so that each epoch groups other samples."""

_ORDER, _REST, _LENGTHS, _BATCHES = range(4)
"""Separate random streams, one per use."""


def steps_per_epoch(samples: int, world: int, batch: int, nsteps: int = 1) -> int:
    """Number of full global batches; the incomplete last one is dropped.

    >>> steps_per_epoch(897, world=8, batch=8)
    14
    """
    return samples // (world * batch * nsteps)


def check_shard(world: int, rank: int, seed: int, **counts: int) -> None:
    for name, value in {"world": world, **counts}.items():
        if value < 1:
            raise DataError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world:
        raise DataError(f"rank must be in 0 … {world - 1}, got {rank}")
    if seed < 0:
        raise DataError(f"seed must not be negative, got {seed}")


@dataclass(frozen=True)
class Sharding:
    """Training batches. The ranks split each global batch without overlap.

    One global batch of P = 2 ranks, batch 2, nsteps 2, its samples sorted by length:

        sample    a b c d | e f g h
        micro     0 0 0 0 | 1 1 1 1
        rank      0 1 0 1 | 0 1 0 1        rank 0: [a, c], [e, g]

    Samples that do not fill a global batch are left out. They change from epoch to epoch, so that any two
    successive epochs see every sample. With `lengths`, a global batch holds samples of similar length.
    """

    samples: int
    world: int
    rank: int
    batch: int
    nsteps: int = 1
    seed: int = 0
    lengths: Sequence[float] | None = None

    def __post_init__(self) -> None:
        check_shard(self.world, self.rank, self.seed, samples=self.samples, batch=self.batch, nsteps=self.nsteps)
        if self.lengths is not None and len(self.lengths) != self.samples:
            raise DataError(f"{len(self.lengths)} lengths for {self.samples} samples")
        if self.steps == 0:
            raise DataError(
                f"{self.samples} samples do not fill one step of {self.world} ranks × batch {self.batch} × "
                f"{self.nsteps} accumulated; use a smaller batch or fewer ranks"
            )

    @property
    def steps(self) -> int:
        return steps_per_epoch(self.samples, self.world, self.batch, self.nsteps)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[list[int]]:
        """Yield this rank's batches of the epoch, nsteps per step, starting at `first_step`."""
        if not 0 <= first_step <= self.steps:
            raise DataError(f"step must be in 0 … {self.steps}, got {first_step}")
        shape = (self.steps, self.nsteps, self.batch, self.world)
        own = self._order(epoch).reshape(shape)[first_step:, :, :, self.rank]
        for step in own:
            for micro in step:
                yield [int(sample) for sample in micro]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Order the samples of the epoch, one global batch after the other."""
        kept = self._random(_ORDER, epoch).permutation(self._kept(epoch))
        if self.lengths is None:
            return kept
        lengths = np.asarray(self.lengths, dtype=np.float64)[kept]
        blurred = lengths * self._random(_LENGTHS, epoch).uniform(1 - _JITTER, 1 + _JITTER, len(kept))
        globals_ = kept[np.argsort(blurred, kind="stable")].reshape(self.steps, -1)
        return self._random(_BATCHES, epoch).permutation(globals_, axis=0).reshape(-1)

    def _kept(self, epoch: int) -> NDArray[np.int64]:
        """Choose the samples of the epoch; the ones left out move around a circle of all samples."""
        circle = self._random(_REST).permutation(self.samples)
        count = self.steps * self.world * self.batch * self.nsteps
        rest = self.samples - count
        start = (epoch + 1) * rest % self.samples
        return np.roll(circle, -start)[:count]

    def _random(self, *use: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *use])


def validation_batches(
    samples: int, world: int, rank: int, batch: int, lengths: Sequence[float] | None = None
) -> list[list[int]]:
    """This rank's validation batches; together the ranks see every sample exactly once.

    The numbers of samples may differ by one between ranks, and so the numbers of batches.

    >>> [validation_batches(5, world=2, rank=rank, batch=2) for rank in (0, 1)]
    [[[0, 2], [4]], [[1, 3]]]
    """
    if not 0 <= rank < world or batch < 1:
        raise DataError(f"no such shard: rank {rank} of {world}, batch {batch}")
    order = list(range(samples))
    if lengths is not None:
        if len(lengths) != samples:
            raise DataError(f"{len(lengths)} lengths for {samples} samples")
        order.sort(key=lengths.__getitem__)
    own = order[rank::world]
    return [own[start : start + batch] for start in range(0, len(own), batch)]
