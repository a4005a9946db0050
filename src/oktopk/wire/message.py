"""The wire format: one message is a header, coded indices, coded values.

    offset  size  field
         0     8  length of the whole message in bytes, a multiple of 8
         8     8  checksum of everything else
        16     4  magic "okt1"; its last character is the version
        20     1  phase                                 21  1  index code
        22     1  value code                            23  1  flags: bit 0 = the sender saw a non-finite number
        24     8  step                                  32  4  bucket                36  4  sender
        40     8  size of the vector                    48  8  start of the region   56  8  span of the region
        64     8  number of entries                     72  8  bytes of coded indices
        80     4  scale of the values (float32)         84  1  Elias-Fano low bits   85  3  blocked
        88        indices, padded to 8 bytes, then values, padded to 8 bytes

All fields are little-endian. Indices are offsets into the region. Value codes from 128 on are those of plug-ins:
a receiver knows the one that the ranks have agreed on. `blocked` is how long the sender has recently waited for
other ranks, in units of 20 µs: the rank that waited least is the straggler.

The decoder does not trust the sender. A message that differs from what the receiver expects raises a WireError,
and the decoder never writes out of bounds. The length comes first, so that messages can be stored back to back or
in slots of fixed capacity.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from ..kernels import codes
from ..kernels.coding import IndexCode
from ..kernels.types import elias_fano_bytes, padded
from ..kernels.values import E4M3_SCALES, Array, ValueCode
from .codecs import VALUE_CODES, CodecError, ValueCodec, Values, read_values, write_values
from .sparse_vector import SparseVector

MAGIC = b"okt1"
_FRAME = struct.Struct("<QQ")
_HEADER = struct.Struct("<4s4BQIIQQQQQfB3s")
FRAME_BYTES = _FRAME.size
"""Length and checksum."""
HEADER_BYTES = _FRAME.size + _HEADER.size
_NONFINITE = 1
_TICK = 20e-6
_MOST_TICKS = 2**24 - 1
_LARGEST = float(np.finfo(np.float32).max)

_INDEX_CODES = frozenset(int(code) for code in IndexCode)
_VALUE_WIDTHS = {int(code): code.width for code in ValueCode}

# Time to encode and decode one entry, expressed in bytes: at 1 Gbit/s a nanosecond costs an eighth of a byte.
_TIME_RAW, _TIME_DELTA16, _TIME_DELTA8, _TIME_ALIGNED, _TIME_PACKED = 0.03, 0.1, 0.31, 0.35, 0.54


class Tag(NamedTuple):
    """What sender and receiver know about a message before it is sent."""

    step: int
    bucket: int
    phase: int
    sender: int
    size: int
    start: int
    span: int


class Outline(NamedTuple):
    """What the header of a message says of its size."""

    length: int
    """Bytes of the whole message."""
    sender: int
    span: int
    entries: int


def outline(data: memoryview, at: int) -> Outline | None:
    """Read the header of the message that begins at a place, unchecked; None if none begins there."""
    if len(data) - at < HEADER_BYTES:
        return None
    fields = _HEADER.unpack_from(data, at + _FRAME.size)
    if fields[0] != MAGIC:
        return None
    return Outline(_FRAME.unpack_from(data, at)[0], sender=fields[7], span=fields[10], entries=fields[11])


class Decoded(NamedTuple):
    """A received message."""

    vector: SparseVector
    nonfinite: bool
    blocked: float


def max_message_bytes(count: int, span: int, values: Values) -> int:
    """Upper bound for a message of at most `count` entries, whichever codes the encoder chooses."""
    count = min(count, span)
    return HEADER_BYTES + padded((4 if span < 2**31 else 8) * count) + padded(values.width * count)


def max_region_bytes(span: int, values: Values) -> int:
    """Upper bound for a region that is sent whole as soon as half of its entries are non-zero."""
    return max(max_message_bytes((span + 1) // 2, span, values), HEADER_BYTES + padded(values.width * span))


def best_index_code(indices: Array, start: int, span: int, raw: bool = False) -> tuple[IndexCode, int, int]:
    """Return (code, size in bytes, Elias-Fano low bits) of the code with the lowest cost in bytes and time."""
    count = indices.size
    if count == span:
        return IndexCode.FULL, 0, 0
    if span >= 2**31:
        return IndexCode.RAW64, 8 * count, 0
    if count == 0 or raw:
        return IndexCode.RAW32, 4 * count, 0
    # Elias-Fano is smallest with log2(span / count) low bits, and faster with whole bytes of low bits.
    tightest = (span // count).bit_length() - 1
    aligned = 8 if tightest < 12 else 16
    best = 4 * count, (4 + _TIME_RAW) * count, IndexCode.RAW32, 0
    for low, time in ((aligned, _TIME_ALIGNED), (tightest, _TIME_PACKED)):
        size = elias_fano_bytes(count, span, low)
        if size + time * count < best[1]:
            best = size, size + time * count, IndexCode.ELIAS_FANO, low
    one, two = codes.escapes(indices, start)
    for size, time, code in (
        (2 * count + 4 * two, _TIME_DELTA16, IndexCode.DELTA16),
        (count + 4 * one, _TIME_DELTA8, IndexCode.DELTA8),
    ):
        if size + time * count < best[1]:
            best = size, size + time * count, code, 0
    size, _, code, low = best
    return code, size, low


def encode(
    part: SparseVector,
    tag: Tag,
    values: Values,
    nonfinite: bool = False,
    raw_indices: bool = False,
    blocked: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the message for `part`, and the values of `part` as the receiver will decode them."""
    indices, floats = _array(part.indices), _array(part.values)
    index_code, index_bytes, low = best_index_code(indices, tag.start, tag.span, raw_indices)
    length = HEADER_BYTES + padded(index_bytes) + padded(values.width * indices.size)
    message = np.empty(length, np.uint8)
    decoded = floats if values is ValueCode.FP32 else np.empty_like(floats)
    body = message[HEADER_BYTES:]
    place = int(index_code), index_bytes, low, tag.start, tag.span
    if isinstance(values, ValueCodec):
        number, scale = values.number, _write_plugin_body(body, *place, indices, values, floats, decoded)
        nonfinite = nonfinite or not np.isfinite(floats).all()
    else:
        number, scale = int(values), codes.write_body(body, *place, indices, int(values), floats, decoded)
    _HEADER.pack_into(
        message.data, _FRAME.size, MAGIC, tag.phase, index_code, number, _NONFINITE if nonfinite else 0,
        tag.step, tag.bucket, tag.sender, tag.size, tag.start, tag.span, indices.size, index_bytes, scale, low,
        min(int(blocked / _TICK), _MOST_TICKS).to_bytes(3, "little"),
    )  # fmt: skip
    _FRAME.pack_into(message.data, 0, length, _checksum(message))
    if decoded is floats:
        return torch.from_numpy(message), part.values
    return torch.from_numpy(message), _tensor(decoded, None if part.values.is_cpu else part.values.device)


def decode(
    message: Tensor, tag: Tag, device: torch.device | None = None, codec: ValueCodec | None = None
) -> Decoded:
    """Check the message against the expected tag and decode it.

    `codec` is that of a plug-in, if the ranks have agreed on one: no other is accepted besides oktopk's own.
    """
    if message.numel() < HEADER_BYTES or message.numel() % 8:
        raise _wire_error(tag, f"{message.numel()} bytes, expected a header of {HEADER_BYTES} bytes or more")
    if message.data_ptr() % 8:
        message = message.clone()
    data = _array(message)
    length, checksum = _FRAME.unpack_from(data.data)
    (magic, phase, index_code, value_code, flags, step, bucket, sender, size, start, span, count, index_bytes,
     scale, low, ticks) = _HEADER.unpack_from(data.data, _FRAME.size)  # fmt: skip
    if magic != MAGIC:
        raise _wire_error(tag, f"magic is {magic!r}, expected {MAGIC!r}: another protocol or version")
    if length != data.size:
        raise _wire_error(tag, f"length field says {length} bytes, received {data.size}")
    if checksum != _checksum(data):
        raise _wire_error(tag, "checksum mismatch")
    found = Tag(step, bucket, phase, sender, size, start, span)
    if found != tag:
        raise _wire_error(tag, f"unexpected message: {found}")
    plugin = codec if codec is not None and value_code == codec.number else None
    width = _VALUE_WIDTHS.get(value_code) if plugin is None else plugin.width
    largest_scale = E4M3_SCALES[1] if plugin is None else _LARGEST
    if index_code not in _INDEX_CODES or width is None or not abs(scale) <= largest_scale:
        raise _wire_error(tag, f"unknown codes: indices {index_code}, values {value_code}, scale {scale}")
    if count > span or HEADER_BYTES + padded(index_bytes) + padded(width * count) != length:
        raise _wire_error(tag, f"{count} entries with {index_bytes} index bytes do not fit {length} bytes")
    indices = np.empty(count, np.int32 if size < 2**31 else np.int64)
    values = np.empty(count, np.float32)
    body, place = data[HEADER_BYTES:], (index_code, index_bytes, low, start, span)
    if plugin is not None:
        in_order = _read_plugin_body(body, *place, indices, plugin, scale, values, tag)
    else:
        in_order = codes.read_body(body, *place, indices, value_code, scale, values)
    if not in_order:
        raise _wire_error(tag, "indices out of order or out of range")
    vector = SparseVector(_tensor(indices, device), _tensor(values, device), size)
    return Decoded(vector, bool(flags & _NONFINITE), int.from_bytes(ticks, "little") * _TICK)


def _write_plugin_body(
    body: Array, index_code: int, index_bytes: int, low: int, start: int, span: int, indices: Array,
    codec: ValueCodec, values: Array, decoded: Array,
) -> float:  # fmt: skip
    """As write_body of the kernels, with a codec of a plug-in."""
    values_at = padded(index_bytes)
    values_end = values_at + codec.width * indices.size
    body[index_bytes:values_at] = 0
    body[values_end:] = 0
    codes.write_indices(indices, index_code, low, start, span, body[:index_bytes])
    return write_values(codec, values, body[values_at:values_end], decoded)


def _read_plugin_body(
    body: Array, index_code: int, index_bytes: int, low: int, start: int, span: int, indices: Array,
    codec: ValueCodec, scale: float, values: Array, tag: Tag,
) -> bool:  # fmt: skip
    """As read_body of the kernels; what the codec of a plug-in makes of the bytes is checked."""
    if not codes.read_indices(body[:index_bytes], index_code, low, start, span, indices):
        return False
    values_at = padded(index_bytes)
    try:
        values[:] = read_values(codec, body[values_at : values_at + codec.width * values.size], scale, values.size)
    except CodecError as error:
        raise _wire_error(tag, str(error)) from error
    return True


def _array(x: Tensor) -> Array:
    return x.numpy() if x.is_cpu else x.cpu().numpy()


def _tensor(x: Array, device: torch.device | None) -> Tensor:
    return torch.from_numpy(x) if device is None else torch.from_numpy(x).to(device)


def _checksum(message: Array) -> int:
    return int(codes.checksum(message[_FRAME.size :].view(np.uint64), message.size))


def _wire_error(tag: Tag, what: str) -> WireError:
    return WireError(
        f"message from rank {tag.sender} (step {tag.step}, bucket {tag.bucket}, phase {tag.phase}): {what}"
    )


__all__ = [
    "FRAME_BYTES",
    "HEADER_BYTES",
    "VALUE_CODES",
    "Decoded",
    "IndexCode",
    "Tag",
    "ValueCode",
    "decode",
    "encode",
    "max_message_bytes",
]
