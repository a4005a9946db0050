"""Buckets that are cut: every entry once, in the order it lies."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from oktopk.feedback.buckets import Bucket, cut

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(sizes, st.integers(1, 300))
def test_pieces_are_neighbours_that_fill_the_bucket(sizes: list[int], cap_bytes: int) -> None:
    bucket = Bucket(tuple(f"p{index}" for index in range(len(sizes))), tuple(sizes))
    pieces = list(reversed(cut(bucket, cap_bytes)))
    assert sum((piece.names for piece, _ in pieces), ()) == bucket.names
    assert sum((piece.sizes for piece, _ in pieces), ()) == bucket.sizes
    for piece, place in pieces:
        assert place.stop - place.start == piece.size
        assert place.start == bucket.places[piece.names[0]].start
        assert 4 * piece.size <= cap_bytes or len(piece.names) == 1


def test_a_bucket_is_known_by_what_it_has_in_other_processes_too() -> None:
    """Strings have other hashes there: what was remembered of them does not come along."""
    bucket = Bucket(("a", "b"), (3, 4))
    known = {bucket: bucket.size}
    assert known[Bucket(("a", "b"), (3, 4))] == 7
    assert Bucket(("a", "b"), (4, 3)) not in known
    copy = pickle.loads(pickle.dumps(bucket))
    assert vars(copy) == {"names": ("a", "b"), "sizes": (3, 4)}
    assert known[copy] == 7
