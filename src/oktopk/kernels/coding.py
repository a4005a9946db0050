"""Index codes, message bodies and the checksum in NumPy: the definition of the byte streams.

`cpu.coding` has the same codes compiled; `values` has the codes of values. Index codes take strictly increasing
offsets 0 <= x[0] < x[1] < … < span from `base`. Decoders do not trust their input: they return False for a stream
that is too short, too long, not increasing, or beyond the span. Streams are uint8 arrays aligned to 8 bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from .types import elias_fano_words, padded
from .values import VALUE_WIDTHS, Array, read_values, write_values


class IndexCode(IntEnum):
    """How the indices of a message are encoded."""

    RAW32 = 0
    RAW64 = 1
    DELTA8 = 2
    DELTA16 = 3
    ELIAS_FANO = 4
    FULL = 5  # every index of the region is present: nothing to write


def write_indices(indices: Array, code: int, low: int, start: int, span: int, out: Array) -> None:
    """Encode indices of the region [start, start + span) into out, which has exactly the size of the code."""
    if code == IndexCode.ELIAS_FANO:
        elias_fano_encode(indices, start, span, low, out)
    elif code == IndexCode.DELTA8 or code == IndexCode.DELTA16:
        delta_encode(indices, start, 1 if code == IndexCode.DELTA8 else 2, out)
    elif code != IndexCode.FULL:
        dtype = np.uint32 if code == IndexCode.RAW32 else np.int64
        out.view(dtype)[:] = indices.astype(np.int64) - start


def read_indices(stream: Array, code: int, low: int, start: int, span: int, out: Array) -> bool:
    """Decode into out. False if the stream is not a strictly increasing sequence of that length in the region."""
    if code == IndexCode.ELIAS_FANO:
        return elias_fano_decode(stream, out.size, low, start, span, out)
    if code == IndexCode.DELTA8 or code == IndexCode.DELTA16:
        return delta_decode(stream, out.size, 1 if code == IndexCode.DELTA8 else 2, start, span, out)
    if code == IndexCode.FULL:
        out[:] = np.arange(start, start + out.size)
        return bool(out.size == span and stream.size == 0)
    dtype = np.dtype(np.uint32 if code == IndexCode.RAW32 else np.int64)
    if stream.size != dtype.itemsize * out.size or not increasing(stream.view(dtype), span):
        return False
    out[:] = stream.view(dtype).astype(np.int64) + start
    return True


def write_body(
    body: Array, index_code: int, index_bytes: int, low: int, start: int, span: int, indices: Array,
    value_code: int, values: Array, decoded: Array,
) -> float:  # fmt: skip
    """Encode indices and values, each padded with zeros to 8 bytes. Returns the scale of the values."""
    values_at = padded(index_bytes)
    values_end = values_at + VALUE_WIDTHS[value_code] * indices.size
    body[index_bytes:values_at] = 0
    body[values_end:] = 0
    write_indices(indices, index_code, low, start, span, body[:index_bytes])
    return write_values(values, value_code, body[values_at:values_end], decoded)


def read_body(
    body: Array, index_code: int, index_bytes: int, low: int, start: int, span: int, indices: Array,
    value_code: int, scale: float, values: Array,
) -> bool:  # fmt: skip
    """Decode a body of the right size. False if the indices are out of order or out of range."""
    values_at = padded(index_bytes)
    values_end = values_at + VALUE_WIDTHS[value_code] * indices.size
    if not read_indices(body[:index_bytes], index_code, low, start, span, indices):
        return False
    read_values(body[values_at:values_end], value_code, scale, values)
    return True


def gaps(indices: Array, base: int) -> Array:
    """The distance of each index from the one before (the first: from base - 1), minus one."""
    offsets = indices.astype(np.int64) - base
    return np.diff(offsets, prepend=-1) - 1


def escapes(indices: Array, base: int) -> tuple[int, int]:
    """Count the gaps that do not fit one byte, and those that do not fit two."""
    g = gaps(indices, base)
    return int((g >= 0xFF).sum()), int((g >= 0xFFFF).sum())


def _cell(width: int) -> tuple[np.dtype[Any], int, int]:
    """The dtype of a cell of `width` bytes, its escape value, and the cells that an escaped 32-bit gap takes."""
    return np.dtype(f"<u{width}"), (1 << 8 * width) - 1, 4 // width


def delta_encode(indices: Array, base: int, width: int, out: Array) -> None:
    """Encode gaps as cells of `width` bytes. A larger gap is the escape value followed by four bytes."""
    dtype, escape, extra = _cell(width)
    g = gaps(indices, base)
    long = g >= escape
    length = np.where(long, 1 + extra, 1)
    start = np.cumsum(length) - length
    cells = np.zeros(int(length.sum()), dtype)
    cells[start] = np.where(long, escape, g)
    tail = g[long].astype("<u4").view(dtype).reshape(-1, extra)
    for j in range(extra):
        cells[start[long] + 1 + j] = tail[:, j]
    out[:] = cells.view(np.uint8)


def delta_decode(stream: Array, count: int, width: int, base: int, span: int, out: Array) -> bool:
    dtype, escape, extra = _cell(width)
    if stream.size % width:
        return False
    cells = stream.view(dtype)
    at, offset = 0, -1
    for j in range(count):
        if at >= cells.size:
            return False
        gap = int(cells[at])
        at += 1
        if gap == escape:
            if at + extra > cells.size:
                return False
            gap = int.from_bytes(cells[at : at + extra].tobytes(), "little")
            at += extra
        offset += gap + 1
        if offset >= span:
            return False
        out[j] = base + offset
    return at == cells.size


def elias_fano_encode(indices: Array, base: int, span: int, low: int, out: Array) -> None:
    """Pack the low bits, and encode the high parts in unary: entry j sets bit (offset >> low) + j."""
    offsets = (indices.astype(np.int64) - base).astype(np.uint64)
    count = offsets.size
    low_words, high_words = elias_fano_words(count, span, low)
    bits = np.zeros((low_words + high_words) * 64, np.uint8)
    if low:
        shifts = np.arange(low, dtype=np.uint64)
        bits[: count * low] = ((offsets[:, None] >> shifts) & np.uint64(1)).astype(np.uint8).ravel()
    high = (offsets >> np.uint64(low)).astype(np.int64) + np.arange(count)
    bits[low_words * 64 + high] = 1
    out[:] = np.packbits(bits, bitorder="little")


def elias_fano_decode(stream: Array, count: int, low: int, base: int, span: int, out: Array) -> bool:
    if not 0 <= low < 32:
        return False
    low_words, high_words = elias_fano_words(count, span, low)
    if stream.size != (low_words + high_words) * 8:
        return False
    bits = np.unpackbits(stream, bitorder="little")
    high = np.flatnonzero(bits[low_words * 64 :])
    if high.size != count:
        return False
    lows = bits[: count * low].reshape(count, low).astype(np.int64) @ (1 << np.arange(low, dtype=np.int64))
    offsets = ((high - np.arange(count)) << low) + lows
    if not increasing(offsets, span):
        return False
    out[:] = offsets + base
    return True


def increasing(offsets: Array, span: int) -> bool:
    """Whether 0 <= x[0] < x[1] < … < span."""
    if offsets.size == 0:
        return True
    return bool(offsets[0] >= 0 and offsets[-1] < span and (offsets[1:] > offsets[:-1]).all())


LANES = 16
PRIME = 0x9E3779B97F4A7C15


def checksum(words: Array, seed: int) -> int:
    """A 64-bit checksum of 64-bit words: 16 interleaved multiply-xor lanes, folded at the end.

    Each lane is a bijection of each of its words, so every change within a single word is detected.
    """
    prime = np.uint64(PRIME)
    lanes = np.arange(LANES, dtype=np.uint64) ^ np.uint64(seed)
    whole = words.size // LANES * LANES
    for row in words[:whole].reshape(-1, LANES):
        lanes = (lanes ^ row) * prime
        lanes ^= lanes >> np.uint64(32)
    rest = words.size - whole
    lanes[:rest] = (lanes[:rest] ^ words[whole:]) * prime
    total = words.size
    for lane in lanes.tolist():
        total = (total ^ lane) * PRIME % 2**64
        total ^= total >> 29
    return int(total)
