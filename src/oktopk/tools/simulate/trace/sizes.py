"""From the size that was recorded to the size that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from oktopk.comm import packed_bytes
from oktopk.wire.message import HEADER_BYTES, ValueCode, best_index_code

_SAMPLE = 1 << 14
_STEPS = 8
"""Densities are told apart by eighths of an octave."""
_WORD = 4


@dataclass(frozen=True)
class Scale:
    """How much larger the tensor is than the recorded one; the density is the same, so k grows alike.

    Entries grow in proportion, headers and control messages do not. The bytes of an index depend on how dense a
    message is; small messages are coded worse than large ones, so a scaled one is priced by what the encoder makes
    of a large one of the same density. Without scaling, messages have the bytes they were recorded with.
    """

    factor: float

    def message_bytes(self, recorded: int, parts: int, entries: int, span: int) -> float:
        if self.factor == 1:
            return recorded
        if not parts:  # not in the wire format: whatever it is, it belongs to the entries
            return recorded * self.factor
        headers = HEADER_BYTES * parts + (packed_bytes(0) if parts > 1 else 0)
        return headers + self.factor * entries * (ValueCode.FP32.width + index_bytes(entries, span))

    def message_words(self, recorded: int, parts: int, entries: int) -> float:
        """Words of four bytes if an index were one word, as the literature counts; headers included."""
        if not parts:
            return recorded * self.factor / _WORD
        return HEADER_BYTES * parts / _WORD + 2 * self.factor * entries


def index_bytes(entries: int, span: int) -> float:
    """Bytes for the index of one entry in a message of this density."""
    if not entries or entries == span:
        return 0.0
    return _coded(round(np.log2(span / entries) * _STEPS))


@cache
def _coded(sparseness: int) -> float:
    """By the encoder's own choice for random places."""
    span = max(_SAMPLE + 1, round(_SAMPLE * 2 ** (sparseness / _STEPS)))
    places = np.random.default_rng(0).choice(span, _SAMPLE, replace=False, shuffle=False)
    return best_index_code(np.sort(places).astype(np.int32), 0, span)[1] / _SAMPLE
