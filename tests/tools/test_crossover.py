"""Whole steps of a model: what backward hides, and the rate below which compression wins."""

from __future__ import annotations

import pytest

from oktopk.tools.crossover import crossover_figures, overlapped_cost, predict_crossover

BIG = 100 << 18
"""Parameters of several DDP buckets."""


def test_backward_hides_all_but_the_first_and_the_last_group() -> None:
    cost = overlapped_cost(1.0, 0.5, 0.1, 4.0 * BIG, BIG)
    fast, slow = 1e15, 1e6
    assert cost.at(fast) == pytest.approx(1.1, abs=1e-3)
    assert cost.at(slow) == pytest.approx(1.1 + 32 * BIG / slow - 0.5 * (1 - (1 << 18) / BIG))


def test_a_model_of_one_bucket_hides_nothing() -> None:
    assert overlapped_cost(1.0, 0.5, 0.0, 4e5, 100_000).at(1e6) == pytest.approx(1.0 + 3.2)


def test_buckets_that_share_messages_hide_less() -> None:
    apart = overlapped_cost(1.0, 0.5, 0.0, 1e6, BIG, density=0.01)
    shared = overlapped_cost(1.0, 0.5, 0.0, 1e6, BIG, density=0.01, fusion_entries=BIG)
    assert shared.hidden_seconds == 0 < apart.hidden_seconds
    assert shared.last_bytes == 1e6 > apart.last_bytes


def test_at_the_crossover_both_take_the_same_time() -> None:
    dense = overlapped_cost(1.0, 0.5, 0.01, 4.0 * BIG, BIG)
    sparse = overlapped_cost(1.0, 0.5, 0.2, 0.08 * BIG, BIG, density=0.01)
    rate = predict_crossover(dense, sparse)
    assert rate is not None
    assert sparse.at(rate) == pytest.approx(dense.at(rate))
    assert sparse.at(rate / 2) < dense.at(rate / 2)
    assert sparse.at(rate * 2) > dense.at(rate * 2)


def test_who_is_faster_at_every_rate_has_no_crossover() -> None:
    cheap, dear = (overlapped_cost(1.0, 0.5, more, 1e6 * more, BIG) for more in (0.1, 0.2))
    assert crossover_figures(dear, cheap) == {"crossover": None, "faster": "at any rate"}
    assert crossover_figures(cheap, dear) == {"crossover": None, "faster": "at no rate"}
