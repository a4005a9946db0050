"""Residuals: they follow their parameters from bucket to bucket."""

from __future__ import annotations

import pytest
import torch

from oktopk.feedback.buckets import Bucket
from oktopk.feedback.residuals import ResidualStore

SIZES = {"a": 3, "b": 5000, "c": 1, "d": 0, "e": 70_001}


def bucket(names: str) -> Bucket:
    return Bucket(tuple(names), tuple(SIZES[name] for name in names))


@pytest.mark.parametrize("layout", [["edcba"], ["b", "ac", "ed"], ["ea", "db", "c"]])
def test_what_parameters_have_comes_along_to_other_buckets(layout: list[str]) -> None:
    feedback = ResidualStore()
    feedback.flat(bucket("abcde")).copy_(torch.arange(sum(SIZES.values()), dtype=torch.float32))
    before = feedback.state_dict()
    for names in layout:
        feedback.flat(bucket(names))
        assert all(torch.equal(before[name], part) for name, part in feedback.state_dict().items())
    assert feedback.state_dict().keys() == before.keys()


def test_a_bucket_that_was_dropped_starts_anew() -> None:
    feedback = ResidualStore()
    for names in ("ab", "c"):
        feedback.flat(bucket(names)).fill_(1.0)
    feedback.drop(bucket("ab"))
    assert feedback.get(bucket("ab")) is None
    assert set(feedback.state_dict()) == {"c"}
    assert not feedback.flat(bucket("ab")).any()


def test_a_parameter_that_left_its_bucket_keeps_no_other_memory() -> None:
    """A frozen parameter keeps its residual, but not that of the whole bucket it was in."""
    feedback = ResidualStore()
    feedback.flat(bucket("abe")).fill_(1.0)
    feedback.flat(bucket("be"))
    left = feedback._by_name["a"]
    assert left.tolist() == [1.0] * 3
    assert left.untyped_storage().nbytes() == 3 * 4
