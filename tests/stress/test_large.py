"""The checks of `make large`, on vectors that fit anywhere; indices above 2^31 are in tests/wire."""

from __future__ import annotations

from stress.large import run


def test_a_small_run_of_the_large_one_is_right() -> None:
    run.three_ranks(3_000_000)
    run.one_rank(1_000_000)


def test_three_ranks_need_no_dense_memory() -> None:
    """The real size: only sparse vectors."""
    run.three_ranks(run.ENTRIES)
