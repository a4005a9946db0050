"""`make hsdp`, shorter: replicas stay the same, and a killed rank is named."""

from __future__ import annotations

import pytest

from stress import hsdp

pytestmark = pytest.mark.timeout(400)


def test_replicas_have_the_same_bits_after_every_step() -> None:
    assert "replicas the same bits" in hsdp.long(60)


def test_a_killed_rank_is_named_within_the_timeout() -> None:
    said = hsdp.killed()
    assert "rank 2 of 2 x 2 killed: named by [" in said
