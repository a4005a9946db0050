"""Scale messages from the recorded size to the requested size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from oktopk.comm import packed_bytes
from oktopk.wire.message import HEADER_BYTES, ValueCode, best_index_code

_SAMPLE = 1 << 14
_STEPS = 8
"""Resolution of densities: eighths of an octave."""
_WORD = 4


@dataclass(frozen=True)
class Scale:
    """The size of the tensor relative to the recorded one, at the same density.

    Entries scale in proportion; headers and control messages do not. The bytes of an index depend on the density
    of a message. Small messages compress worse than large ones, so a scaled message gets the index size that the
    encoder achieves for a large one of the same density. At factor 1, messages keep their recorded bytes.
    """

    factor: float

    def message_bytes(self, recorded: int, parts: int, entries: int, span: int) -> float:
        if self.factor == 1:
            return recorded
        if not parts:  # not in the wire format: scale it like entries
            return recorded * self.factor
        headers = HEADER_BYTES * parts + (packed_bytes(0) if parts > 1 else 0)
        return headers + self.factor * entries * (ValueCode.FP32.width + index_bytes(entries, span))

    def message_words(self, recorded: int, parts: int, entries: int) -> float:
        """Words of four bytes with one word per index, as in the literature; headers included."""
        if not parts:
            return recorded * self.factor / _WORD
        return HEADER_BYTES * parts / _WORD + 2 * self.factor * entries


def index_bytes(entries: int, span: int) -> float:
    """Bytes for the index of one entry in a message of this density."""
    if not entries or entries == span:
        return 0.0
    return _encoded_index_bytes(round(np.log2(span / entries) * _STEPS))


@cache
def _encoded_index_bytes(sparseness: int) -> float:
    """Bytes per index that the encoder achieves for random positions."""
    span = max(_SAMPLE + 1, round(_SAMPLE * 2 ** (sparseness / _STEPS)))
    places = np.random.default_rng(0).choice(span, _SAMPLE, replace=False, shuffle=False)
    return best_index_code(np.sort(places).astype(np.int32), 0, span)[1] / _SAMPLE
