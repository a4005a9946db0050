"""Law 4: the meter shows each algorithm's own row of the cost table, in words and in messages.

    algorithm   words sent per rank          messages per rank
    dense       2n(P-1)/P                    2(P-1), modelled as a ring
    topka       2k(P-1)                      ceil(log2 P)
    topkdsa     4k(P-1)/P … (2k+n)(P-1)/P    P-1 + ceil(log2 P)
    gtopk       4k log P at the root         2 ceil(log2 P) at the root
    gaussiank   2k(P-1), k within a third    ceil(log2 P)
    oktopk      <= 6k(P-1)/P                 P-1 + ceil(log2 P), P-1 more to balance
    (oktopk-static: tests/algorithms/test_oktopk_static.py)

Raw indices make an entry two words of four bytes; headers come on top and are subtracted.
"""

from __future__ import annotations

import math

import pytest
from torch import Tensor

import oktopk
from oktopk.algorithms import OkTopk
from oktopk.comm import Traffic, total
from oktopk.testing.gradients import heavy_tailed
from oktopk.testing.laws import Outcome, Steps, assert_laws, run
from oktopk.wire.message import HEADER_BYTES

SIZE, DENSITY = 20_011, 0.02
K = int(SIZE * DENSITY)
WORLDS = (2, 3, 4, 5, 7, 8)
CONTROL = {"agreement", "regions", "counts", "exact counts", "magnitudes", "histogram", "digest"}


def rounds(world: int) -> int:
    return math.ceil(math.log2(world))


def phase(outcome: Outcome, name: str) -> Traffic:
    return total(outcome.info.traffic, lambda operation: operation.phase == name)


def words(outcome: Outcome, vectors: int) -> float:
    """Words of payload sent, when `vectors` sparse vectors were written into the messages.

    Each brings a header and at most 8 bytes of padding; each message of several brings its own length.
    """
    payload = outcome.info.payload
    return (payload.sent_bytes - vectors * HEADER_BYTES) / 4


def slack(outcome: Outcome, vectors: int) -> float:
    return (8 * vectors + 8 * outcome.info.payload.sent_messages) / 4


def raw(algorithm: str | OkTopk, world: int, steps: int = 6, size: int = SIZE) -> Steps:
    steps_run = run(world, heavy_tailed(size), steps, algorithm, DENSITY, indices="raw")
    assert_laws(steps_run)
    return steps_run


@pytest.mark.parametrize("world", WORLDS)
def test_dense_is_modelled_as_a_ring(world: int) -> None:
    for step in raw("dense", world, 2):
        for outcome in step:
            traffic = phase(outcome, "dense")
            assert traffic.modelled
            assert traffic.sent_bytes == 2 * 4 * SIZE * (world - 1) // world
            assert traffic.sent_messages == 2 * (world - 1)


@pytest.mark.parametrize("world", WORLDS)
def test_topka_sends_all_of_k_to_everybody(world: int) -> None:
    vectors = world - 1
    for step in raw("topka", world):
        for outcome in step:
            sent = words(outcome, vectors)
            assert 2 * K * vectors <= sent <= 2 * K * vectors + slack(outcome, vectors)
            assert outcome.info.payload.sent_messages == rounds(world)
            assert not outcome.info.payload.modelled


@pytest.mark.parametrize("world", WORLDS)
def test_gaussiank_sends_its_selection_to_everybody(world: int) -> None:
    for step in raw("gaussiank", world):
        everybody = sum(outcome.info.local_count for outcome in step)
        assert sum(words(outcome, world - 1) for outcome in step) >= 2 * everybody * (world - 1)
        for outcome in step:
            assert math.ceil(2 * K / 3) <= outcome.info.local_count <= 4 * K // 3
            limit = 2 * (4 * K // 3) * (world - 1) + slack(outcome, world - 1)
            assert words(outcome, world - 1) <= limit
            assert outcome.info.payload.sent_messages == rounds(world)


@pytest.mark.parametrize("world", WORLDS)
def test_topkdsa_gathers_every_sum(world: int) -> None:
    vectors = 2 * (world - 1)
    for step in raw("topkdsa", world):
        for outcome in step:
            sent = words(outcome, vectors)
            most = 2 * outcome.info.local_count + SIZE * (world - 1) / world  # all of it to others, then dense
            assert sent <= most + slack(outcome, vectors)
            assert outcome.info.payload.sent_messages == world - 1 + rounds(world)
        mean = sum(words(outcome, vectors) for outcome in step) / world
        assert (
            4 * K * (world - 1) / world <= mean <= (2 * K + SIZE) * (world - 1) / world + slack(step[0], vectors)
        )
        assert outcome.info.result_count > 1.5 * K  # not cut to k


def test_topkdsa_goes_dense_where_the_sums_fill_in() -> None:
    """At high density a region is sent as it is: no indices, (2k + n)(P-1)/P words and not more."""
    world, size = 4, 4000
    (step,) = run(world, heavy_tailed(size), 1, "topkdsa", 0.3, indices="raw")
    gathered = total(step[0].info.traffic, lambda operation: operation.phase == "gather").sent_bytes
    dense = 4 * size * (world - 1) // world
    assert dense <= gathered <= dense + 3 * (HEADER_BYTES + 8) + 16


@pytest.mark.parametrize("world", WORLDS)
def test_gtopk_merges_along_a_tree(world: int) -> None:
    for step in raw("gtopk", world):
        root = step[0].info
        up = [phase(outcome, "tree") for outcome in step]
        down = [phase(outcome, "broadcast") for outcome in step]
        assert sum(t.sent_messages for t in up) == world - 1
        assert sum(t.sent_messages for t in down) == world - 1
        assert all(t.sent_messages <= 1 for t in up)
        assert up[0].received_messages <= rounds(world)
        assert down[0].sent_messages == rounds(world)
        assert root.result_count == K
        moved = root.payload.sent_bytes + root.payload.received_bytes
        limit = 4 * K * rounds(world) + slack(step[0], 2 * rounds(world))
        assert moved / 4 - 2 * rounds(world) * HEADER_BYTES / 4 <= limit


def oktopk_bound(step: list[Outcome], outcome: Outcome) -> float:
    """2L + 4 ceil(G/P) (P-1)"""
    world = len(step)
    survivors = outcome.info.result_count
    return 2 * outcome.info.local_count + 4 * math.ceil(survivors / world) * (world - 1)


@pytest.mark.parametrize("algorithm", [OkTopk(), OkTopk(tau=3, tau_prime=4), OkTopk(tau=1, tau_prime=1)])
@pytest.mark.parametrize("world", WORLDS)
def test_oktopk_keeps_its_bound_on_every_step(algorithm: OkTopk, world: int) -> None:
    """Exact evaluations and re-partitions included, with residuals that grow."""
    steps = raw(algorithm, world, steps=algorithm.tau_prime + 8)
    cap = math.floor(1.25 * K)
    means = []
    for step in steps:
        for outcome in step:
            balanced = phase(outcome, "balance").sent_messages
            vectors = 2 * (world - 1) + balanced
            assert outcome.info.local_count <= cap
            assert outcome.info.result_count <= cap
            assert words(outcome, vectors) <= oktopk_bound(step, outcome) + slack(outcome, vectors)
            assert outcome.info.payload.sent_messages == world - 1 + rounds(world) + balanced
            means.append(words(outcome, vectors))
    assert sum(means) / len(means) <= 6 * K * (world - 1) / world
    if algorithm.tau_prime > 1:
        assert {o.info.exact for step in steps for o in step} == {
            o.info.global_exact for step in steps for o in step
        }
        assert {o.info.exact for step in steps for o in step} == {True, False}


def skewed(rank: int, step: int) -> Tensor:
    """All that matters globally lies in rank 0's region, which alternates with what matters locally."""
    x = heavy_tailed(SIZE)(rank, step)
    if step % 2:
        x[: SIZE // 20] *= 1e4
    return x


@pytest.mark.parametrize("values", ["fp32", "fp16", "e4m3"])
@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_oktopk_balances_before_it_gathers(world: int, values: str) -> None:
    """When one region has most of the survivors, they are spread first; the bound and the laws hold."""
    steps = run(world, skewed, 8, OkTopk(tau=100), DENSITY, indices="raw", values=values)
    assert_laws(steps)
    balanced = 0
    for step in steps:
        for outcome in step:
            moved = phase(outcome, "balance").sent_messages
            balanced += moved
            vectors = 2 * (world - 1) + moved
            if values == "fp32":
                assert words(outcome, vectors) <= oktopk_bound(step, outcome) + slack(outcome, vectors)
    assert balanced > 0


def test_oktopk_does_not_grow_with_the_number_of_ranks() -> None:
    """Words over k(P-1)/P stay within 10 % from 2 to 32 ranks; TopkA's grow with P."""
    ratio = {}
    for algorithm in ("oktopk", "topka"):
        for world in (2, 4, 8, 16, 32):
            steps = raw(algorithm, world, 4)
            vectors = (2 if algorithm == "oktopk" else 1) * (world - 1)
            mean = sum(words(o, vectors) for step in steps for o in step) / (len(steps) * world)
            ratio[algorithm, world] = mean / (K * (world - 1) / world)
    flat = [ratio["oktopk", world] for world in (2, 4, 8, 16, 32)]
    assert max(flat) / min(flat) < 1.1
    assert max(flat) <= 6
    assert ratio["topka", 32] / ratio["topka", 2] == pytest.approx(16, rel=0.02)


@pytest.mark.parametrize("algorithm", [name for name in oktopk.ALGORITHMS if name != "dense"])
def test_what_a_rank_selects_stays_in_the_band(algorithm: str) -> None:
    """Also while residuals grow: the density a rank sends is the one that was asked for."""
    low, high = oktopk.ALGORITHMS[algorithm].band
    for step in raw(algorithm, 3, steps=30):
        for outcome in step:
            assert low * K <= outcome.info.local_count <= high * K


def test_control_bytes_are_counted_apart() -> None:
    """Sizes, boundaries and candidates are control; an all_reduce among them is labelled modelled."""
    (step,) = raw("oktopk", 4, 1)
    for operation, traffic in step[0].info.traffic.items():
        expected = operation.phase in CONTROL
        assert operation.control == expected
        assert traffic.modelled == (operation.name == "all_reduce")
    assert step[0].info.payload.sent_bytes > 0
    assert step[0].info.control.sent_bytes > 0


def test_no_algorithm_is_another_one_with_a_different_name() -> None:
    """On one input, no two of them move the same bytes in the same phases."""
    seen = set()
    for algorithm in oktopk.ALGORITHMS:
        (step,) = raw(algorithm, 5, 1)
        traffic = step[1].info.traffic
        payload = {(o.name, o.phase): t.sent_bytes for o, t in traffic.items() if not o.control}
        seen.add(tuple(sorted(payload.items())))
    assert len(seen) == len(oktopk.ALGORITHMS)
