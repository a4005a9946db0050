"""Ranks compare all bytes of a result: messages with equal checksums do not pass for each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import oktopk
from oktopk.comm import Digest
from oktopk.kernels import codes
from stress.fuzz import lies, lying
from stress.fuzz.lying import Case, case

SIZE = 20_000


def twin_told_to_one_rank(engine: bool, algorithm: str = "topka") -> Case:
    """Rank 1 sends one rank a message with three other signs and the same checksum, and then hides."""
    return replace(
        case(0), world=3, algorithm=algorithm, settings=(), size=SIZE, density=0.05, values="fp32", steps=1,
        engine=engine, liar=1, phase="gather", step=0, told_once=True, place=0, hides=True,
        lie=lies.Lie(lies.TWIN, 3, own_only=False), momentum=0.0, dense_below=0,
    )  # fmt: skip


def test_two_messages_with_one_checksum_are_easy_to_make() -> None:
    words = np.random.default_rng(0).integers(0, 2**63, 64, dtype=np.uint64)
    before = codes.checksum(words, 512)
    words[20] ^= np.uint64(1 << 63)
    words[36] ^= np.uint64(1 << 63 | 1 << 31)
    assert codes.checksum(words, 512) == before


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("algorithm", ["topka", "oktopk"])
def test_equal_checksums_do_not_hide_different_results(engine: bool, algorithm: str) -> None:
    made = twin_told_to_one_rank(engine, algorithm)
    reports, liar = lying.run(made, lying.PATIENT)
    assert liar.told
    for rank in (0, 2):
        assert reports[rank].steps == []
        assert isinstance(reports[rank].error, oktopk.WireError | oktopk.Aborted)
        assert "told others different things" in str(reports[rank].error)


def test_a_digest_depends_on_every_byte_and_on_where_parts_end() -> None:
    content = torch.arange(24, dtype=torch.uint8)
    values = {Digest().add(content[:cut]).add(content[cut:].contiguous()).value for cut in range(25)}
    for byte in range(24):
        changed = content.clone()
        changed[byte] ^= 1
        values.add(Digest().add(changed).value)
    assert len(values) == 49


def test_a_copy_of_a_digest_goes_on_by_itself() -> None:
    first = Digest().add(b"one")
    second = first.copy().add(b"two")
    assert first.value == Digest().add(b"one").value != second.value
