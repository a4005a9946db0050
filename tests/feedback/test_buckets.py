"""Buckets as keys: equal names and sizes are the same bucket, in every process."""

from __future__ import annotations

import pickle

from oktopk.feedback.buckets import Bucket


def test_a_bucket_is_known_by_what_it_has_in_other_processes_too() -> None:
    """Strings have other hashes there: no hash comes along."""
    bucket = Bucket(("a", "b"), (3, 4))
    known = {bucket: bucket.size}
    assert known[Bucket(("a", "b"), (3, 4))] == 7
    assert Bucket(("a", "b"), (4, 3)) not in known
    copy = pickle.loads(pickle.dumps(bucket))
    assert copy == bucket
    assert known[copy] == 7
