"""Item 17b: steps per epoch, shards without overlap, every sample comes, validation sees each sample once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data.problems import DataError
from oktopk.train.data.shard import Sharding, steps_per_epoch, validation_batches

Batches = list[list[int]]


def every_rank(samples: int, world: int, batch: int, nsteps: int, epoch: int, **more: object) -> list[Batches]:
    shards = (Sharding(samples, world, rank, batch, nsteps, **more) for rank in range(world))  # type: ignore[arg-type]
    return [list(shard.batches(epoch)) for shard in shards]


def flat(ranks: list[Batches]) -> list[int]:
    return [sample for batches in ranks for batch in batches for sample in batch]


@pytest.mark.parametrize(
    ("samples", "world", "batch", "nsteps", "steps"),
    [
        (897, 8, 8, 1, 14),
        (897, 8, 8, 2, 7),
        (948, 8, 8, 1, 14),
        (64, 8, 8, 1, 1),
        (63, 8, 8, 1, 0),
        (7, 1, 1, 1, 7),
    ],
)
def test_steps_per_epoch(samples: int, world: int, batch: int, nsteps: int, steps: int) -> None:
    assert steps_per_epoch(samples, world, batch, nsteps) == steps


sizes = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6)
)


@given(sizes, st.integers(0, 50), st.integers(0, 2**40), st.booleans())
def test_two_epochs_see_every_sample_and_no_epoch_any_twice(
    size: tuple[int, int, int, int, int], epoch: int, seed: int, bucketed: bool
) -> None:
    world, batch, nsteps, steps, rest = size
    unit = world * batch * nsteps
    samples = steps * unit + rest % unit
    lengths = [1.0 + i % 7 for i in range(samples)] if bucketed else None
    epochs = [every_rank(samples, world, batch, nsteps, e, seed=seed, lengths=lengths) for e in (epoch, epoch + 1)]
    for ranks in epochs:
        assert [len(batches) for batches in ranks] == [steps * nsteps] * world
        assert {len(one) for batches in ranks for one in batches} == {batch}
        assert max(Counter(flat(ranks)).values()) == 1
    assert set(flat(epochs[0])) | set(flat(epochs[1])) == set(range(samples))


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else() -> None:
    for lengths in (None, list(range(1, 101))):
        one, again = (every_rank(100, 2, 4, 1, 3, seed=5, lengths=lengths) for _ in range(2))
        assert one == again
        assert every_rank(100, 2, 4, 1, 4, seed=5, lengths=lengths) != one
        assert every_rank(100, 2, 4, 1, 3, seed=6, lengths=lengths) != one


def test_bucketed_batches_have_other_members_in_each_epoch() -> None:
    lengths = [1 + i / 100 for i in range(640)]
    first, second = (
        {frozenset(batch) for batch in Sharding(640, 1, 0, 8, lengths=lengths).batches(epoch)} for epoch in (0, 1)
    )
    assert len(first & second) < len(first) // 4


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.integers(0, 3))
def test_an_epoch_goes_on_from_any_step(world: int, nsteps: int, step: int, epoch: int) -> None:
    samples = 6 * world * nsteps * 2 + 1
    for rank in range(world):
        shard = Sharding(samples, world, rank, 2, nsteps, seed=1, lengths=list(range(1, samples + 1)))
        assert list(shard.batches(epoch, step)) == list(shard.batches(epoch))[step * nsteps :]


def test_all_ranks_take_the_same_global_batch_whatever_their_number() -> None:
    lengths = np.random.default_rng(0).uniform(1, 6, 200).tolist()
    wholes = []
    for world, batch in ((1, 16), (4, 4), (16, 1)):
        ranks = every_rank(200, world, batch, 1, 2, seed=9, lengths=lengths)
        wholes.append([set(flat([[batches[step]] for batches in ranks])) for step in range(200 // 16)])
    assert wholes[0] == wholes[1] == wholes[2]


def padding(batches: Batches, lengths: list[float]) -> float:
    return sum(max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in batches)


def test_bucketing_leaves_little_to_pad_and_mixes_short_and_long_batches() -> None:
    lengths = np.random.default_rng(1).uniform(1, 6, 897).tolist()
    plain = [batch for batches in every_rank(897, 8, 8, 1, 0) for batch in batches]
    sorted_ = [batch for batches in every_rank(897, 8, 8, 1, 0, lengths=lengths) for batch in batches]
    assert padding(sorted_, lengths) < padding(plain, lengths) / 3
    means = [np.mean([lengths[i] for i in batch]) for batch in Sharding(897, 8, 0, 8, lengths=lengths).batches(0)]
    assert means != sorted(means)
    assert means != sorted(means, reverse=True)


@given(st.integers(0, 70), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_validation_sees_every_sample_once(samples: int, world: int, batch: int, bucketed: bool) -> None:
    lengths = [float(-i % 5) for i in range(samples)] if bucketed else None
    shares = [validation_batches(samples, world, rank, batch, lengths) for rank in range(world)]
    assert sorted(flat(shares)) == list(range(samples))
    assert all(0 < len(one) <= batch for share in shares for one in share)
    counts = [len(flat([share])) for share in shares]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 63}, "63 samples do not fill one step of 8 ranks × batch 8 × 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"nsteps": 0}, "nsteps must be at least 1"),
        ({"rank": 8}, r"rank must be in 0 … 7, got 8"),
        ({"seed": -1}, "seed must not be negative"),
        ({"lengths": [1.0]}, "1 lengths for 897 samples"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    good = {"samples": 897, "world": 8, "rank": 0, "batch": 8}
    with pytest.raises(DataError, match=message):
        Sharding(**{**good, **arguments})  # type: ignore[arg-type]


def test_a_step_beyond_the_epoch_is_an_error() -> None:
    with pytest.raises(DataError, match="step must be in 0 … 14, got 15"):
        list(Sharding(897, 8, 0, 8).batches(0, 15))
