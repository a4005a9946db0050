"""The codes of `kernels.coding`, compiled: the same bytes, one or two nanoseconds per entry.

Each public function is a single call into compiled code: a few such calls take longer than encoding a message of
a few thousand entries.
"""

from __future__ import annotations

import numpy as np

from ..coding import LANES, PRIME, IndexCode
from ..types import elias_fano_words, padded
from ..values import VALUE_WIDTHS
from .values import read_values, write_values
from .vector import compiled, trailing_zeros

_RAW32, _RAW64, _DELTA8, _DELTA16, _ELIAS_FANO = (
    int(IndexCode[name]) for name in ("RAW32", "RAW64", "DELTA8", "DELTA16", "ELIAS_FANO")
)
_PRIME = np.uint64(PRIME)


@compiled
def escapes(indices, base):
    before = np.int64(base - 1)
    one, two = 0, 0
    for j in range(indices.size):
        gap = np.int64(indices[j]) - before - 1
        before = np.int64(indices[j])
        one += int(gap >= 0xFF)
        two += int(gap >= 0xFFFF)
    return one, two


# --- gaps with escape ----------------------------------------------------------------------------------------


@compiled
def _delta_encode(indices, base, bits, cells):
    at = 0
    before = np.int64(base - 1)
    escape = np.int64((1 << bits) - 1)
    for j in range(indices.size):
        gap = np.int64(indices[j]) - before - 1
        before = np.int64(indices[j])
        if gap < escape:
            cells[at] = gap
            at += 1
        else:
            cells[at] = escape
            at += 1
            for shift in range(0, 32, bits):
                cells[at] = (gap >> shift) & escape
                at += 1


@compiled
def _delta_decode(cells, bits, base, span, out):
    at = 0
    offset = np.int64(-1)
    escape = np.int64((1 << bits) - 1)
    for j in range(out.size):
        if at >= cells.size:
            return False
        gap = np.int64(cells[at])
        at += 1
        if gap == escape:
            if at + 32 // bits > cells.size:
                return False
            gap = np.int64(0)
            for shift in range(0, 32, bits):
                gap |= np.int64(cells[at]) << shift
                at += 1
        offset += gap + 1
        if offset >= span:
            return False
        out[j] = base + offset
    return at == cells.size


# --- Elias-Fano ----------------------------------------------------------------------------------------------

_words = compiled(elias_fano_words)


@compiled
def _write_highs(indices, base, low, highs):
    word, at = np.uint64(0), np.int64(0)
    for j in range(indices.size):
        high = ((np.int64(indices[j]) - base) >> low) + j
        if high >> 6 != at:
            if not at < high >> 6 < highs.size:
                raise ValueError("indices out of order or outside the region")
            highs[at] = word
            word, at = np.uint64(0), high >> 6
        word |= np.uint64(1) << np.uint64(high & 63)
    highs[at] = word


@compiled
def _write_offsets(indices, base, out):
    """Each offset, or as many of its low bits as a cell of `out` has."""
    for j in range(indices.size):
        out[j] = indices[j] - base


@compiled
def _pack_lows(indices, base, low, lows):
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    word, filled, at = np.uint64(0), 0, 0
    for j in range(indices.size):
        part = np.uint64(np.int64(indices[j]) - base) & mask
        word |= part << np.uint64(filled)
        filled += low
        if filled >= 64:
            lows[at] = word
            at += 1
            filled -= 64
            word = part >> np.uint64(low - filled)
    if filled:
        lows[at] = word


@compiled
def _elias_fano_encode(indices, base, span, low, out):
    """Whole bytes of low bits are stored directly, any other number of bits is packed. The layout is the same."""
    words = out.view(np.uint64)
    low_words = _words(indices.size, span, low)[0]
    words[:] = 0
    if indices.size == 0:
        return
    if low == 8:
        _write_offsets(indices, base, words[:low_words].view(np.uint8))
    elif low == 16:
        _write_offsets(indices, base, words[:low_words].view(np.uint16))
    elif low:
        _pack_lows(indices, base, low, words[:low_words])
    _write_highs(indices, base, low, words[low_words:])


@compiled
def _read_highs(highs, low, base, span, out):
    """Decode the high parts, shifted, plus base into out. False if their number is not that of out."""
    j = 0
    for w in range(highs.size):
        bits = highs[w]
        while bits:
            high = w * 64 + np.int64(trailing_zeros(bits)) - j
            if j >= out.size or high > span >> low:
                return False
            out[j] = base + (high << low)
            bits &= bits - np.uint64(1)
            j += 1
    return j == out.size


@compiled
def _add_lows(lows, out):
    for j in range(out.size):
        out[j] += lows[j]


@compiled
def _add_packed_lows(lows, low, out):
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    word, left, at = np.uint64(0), 0, 0
    for j in range(out.size):
        if left >= low:
            part = word & mask
            word >>= np.uint64(low)
            left -= low
        else:
            following = lows[at]
            at += 1
            part = (word | (following << np.uint64(left))) & mask
            word = following >> np.uint64(low - left)
            left += 64 - low
        out[j] += np.int64(part)


@compiled
def _increasing(x, start, span):
    if x.size == 0:
        return True
    bad = False
    for j in range(1, x.size):
        bad |= x[j] <= x[j - 1]
    return not bad and x[0] >= start and x[x.size - 1] < start + span


@compiled
def _elias_fano_decode(stream, low, base, span, out):
    if low < 0 or low >= 32:
        return False
    low_words, high_words = _words(out.size, span, low)
    if stream.size != (low_words + high_words) * 8:
        return False
    words = stream.view(np.uint64)
    if not _read_highs(words[low_words:], low, base, span, out):
        return False
    if low == 8:
        _add_lows(words[:low_words].view(np.uint8), out)
    elif low == 16:
        _add_lows(words[:low_words].view(np.uint16), out)
    elif low:
        _add_packed_lows(words[:low_words], low, out)
    return _increasing(out, base, span)


# --- all index codes -----------------------------------------------------------------------------------------


@compiled
def write_indices(indices, code, low, start, span, out):
    if code == _ELIAS_FANO:
        _elias_fano_encode(indices, start, span, low, out)
    elif code == _DELTA8:
        _delta_encode(indices, start, 8, out)
    elif code == _DELTA16:
        _delta_encode(indices, start, 16, out.view(np.uint16))
    elif code == _RAW32:
        _write_offsets(indices, start, out.view(np.uint32))
    elif code == _RAW64:
        _write_offsets(indices, start, out.view(np.int64))


@compiled
def _read_raw(offsets, start, span, out):
    if not _increasing(offsets, 0, span):
        return False
    for j in range(out.size):
        out[j] = np.int64(offsets[j]) + start
    return True


@compiled
def read_indices(stream, code, low, start, span, out):
    if code == _ELIAS_FANO:
        return _elias_fano_decode(stream, low, start, span, out)
    if code == _DELTA8:
        return _delta_decode(stream, 8, start, span, out)
    if code == _DELTA16:
        return stream.size % 2 == 0 and _delta_decode(stream.view(np.uint16), 16, start, span, out)
    if code == _RAW32:
        return stream.size == 4 * out.size and _read_raw(stream.view(np.uint32), start, span, out)
    if code == _RAW64:
        return stream.size == 8 * out.size and _read_raw(stream.view(np.int64), start, span, out)
    for j in range(out.size):
        out[j] = start + j
    return out.size == span and stream.size == 0


# --- a whole message, in one call ----------------------------------------------------------------------------

_padded = compiled(padded)


@compiled
def write_body(body, index_code, index_bytes, low, start, span, indices, value_code, values, decoded):
    values_at = _padded(index_bytes)
    values_end = values_at + VALUE_WIDTHS[value_code] * indices.size
    body[index_bytes:values_at] = 0
    body[values_end:] = 0
    write_indices(indices, index_code, low, start, span, body[:index_bytes])
    return write_values(values, value_code, body[values_at:values_end], decoded)


@compiled
def read_body(body, index_code, index_bytes, low, start, span, indices, value_code, scale, values):
    values_at = _padded(index_bytes)
    values_end = values_at + VALUE_WIDTHS[value_code] * indices.size
    if not read_indices(body[:index_bytes], index_code, low, start, span, indices):
        return False
    read_values(body[values_at:values_end], value_code, scale, values)
    return True


# --- checksum ------------------------------------------------------------------------------------------------


@compiled
def checksum(words, seed):
    lanes = np.empty(LANES, np.uint64)
    for lane in range(LANES):
        lanes[lane] = np.uint64(lane) ^ np.uint64(seed)
    whole = words.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            mixed = (lanes[lane] ^ words[start + lane]) * _PRIME
            lanes[lane] = mixed ^ (mixed >> np.uint64(32))
    for j in range(whole, words.size):
        lanes[j - whole] = (lanes[j - whole] ^ words[j]) * _PRIME
    total = np.uint64(words.size)
    for lane in range(LANES):
        total = (total ^ lanes[lane]) * _PRIME
        total ^= total >> np.uint64(29)
    return total
