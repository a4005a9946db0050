"""Cases by number: a real message, changed. The same number is always the same case."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from oktopk.kernels import types
from oktopk.kernels.coding import IndexCode
from oktopk.kernels.types import padded
from oktopk.kernels.values import VALUE_WIDTHS
from oktopk.wire import message as wire
from oktopk.wire.message import HEADER_BYTES, MAGIC, Tag
from stress.fuzz.corpus import Real, corpus

LONGEST = 2**15
"""Bytes of a case; whatever would be longer is cut."""
FIELDS: dict[str, tuple[int, str]] = {
    "length": (0, "<Q"), "checksum": (8, "<Q"), "magic": (16, "<I"), "phase": (20, "B"), "index code": (21, "B"),
    "value code": (22, "B"), "flags": (23, "B"), "step": (24, "<Q"), "bucket": (32, "<I"), "sender": (36, "<I"),
    "size": (40, "<Q"), "start": (48, "<Q"), "span": (56, "<Q"), "count": (64, "<Q"), "index bytes": (72, "<Q"),
    "scale": (80, "<I"), "low": (84, "B"), "blocked": (85, "B"),
}  # fmt: skip
_NAMES = tuple(FIELDS)
_DECISIVE = ("index code", "value code", "count", "index bytes", "scale", "low")
_EXTREME = (0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
            2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)  # fmt: skip
END_TO_END = "laid end to end"
_EXTREME_BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF)


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    """What was done to the message."""
    message: bytes
    tag: Tag


def case(number: int) -> Case:
    random = Random(number)
    real = random.choice(corpus())
    kind, change = random.choice(_CHANGES)
    data = change(random, bytearray(real.message), real)
    if random.random() < 0.25:
        data = random.choice(_CHANGES)[1](random, data, real)
    del data[LONGEST:]
    _disguise(random, data, None if kind == END_TO_END else real.tag)
    return Case(number, kind, bytes(data), real.tag)


def _disguise(random: Random, data: bytearray, tag: Tag | None) -> None:
    """Mostly, what is checked first is right, so that what is behind it is reached."""
    if len(data) >= 8 and random.random() < 0.95:
        struct.pack_into("<Q", data, 0, len(data))
    if tag is None or len(data) < HEADER_BYTES:
        return
    if random.random() < 0.95:
        struct.pack_into("<4sB", data, 16, MAGIC, tag.phase)
        struct.pack_into("<QIIQQQ", data, 24, tag.step, tag.bucket, tag.sender, tag.size, tag.start, tag.span)
    if len(data) % 8 == 0 and random.random() < 0.95:
        struct.pack_into("<Q", data, 8, wire._checksum(np.frombuffer(data, np.uint8)))


# What is done to a message.


def _as_it_is(random: Random, data: bytearray, real: Real) -> bytearray:
    return data


def _flip_bits(random: Random, data: bytearray, real: Real) -> bytearray:
    first = HEADER_BYTES if len(data) > HEADER_BYTES and random.random() < 0.7 else 0
    for _ in range(random.randint(1, 6) if len(data) > first else 0):
        data[random.randrange(first, len(data))] ^= 1 << random.randrange(8)
    return data


def _set_bytes(random: Random, data: bytearray, real: Real) -> bytearray:
    """A run of equal bytes, somewhere."""
    at = random.randrange(len(data) + 1)
    stop = min(len(data), at + random.choice((1, 1, 2, 4, 8, 64)))
    data[at:stop] = bytes([random.choice(_EXTREME_BYTES)]) * (stop - at)
    return data


def _set_field(random: Random, data: bytearray, real: Real) -> bytearray:
    offset, form = FIELDS[random.choice(_NAMES if random.random() < 0.3 else _DECISIVE)]
    bits = 8 * struct.calcsize(form)
    if len(data) >= HEADER_BYTES:
        (before,) = struct.unpack_from(form, data, offset)
        span = real.tag.span
        value = random.choice((*_EXTREME, before - 1, before + 1, before + 8, 2 * before, span, span + 1))
        struct.pack_into(form, data, offset, value % 2**bits)
    return data


def _cut(random: Random, data: bytearray, real: Real) -> bytearray:
    length = random.randrange(len(data) + 1)
    return data[: length if random.random() < 0.2 else length // 8 * 8]


def _extend(random: Random, data: bytearray, real: Real) -> bytearray:
    extra = random.choice((1, 4, 8, 16, 64, 4096))
    return data + (bytes(extra) if random.random() < 0.5 else random.randbytes(extra))


def _noise(random: Random, data: bytearray, real: Real) -> bytearray:
    return bytearray(random.randbytes(8 * random.randrange(40)))


def _other_body(random: Random, data: bytearray, real: Real) -> bytearray:
    """Random bytes of the right length behind the header."""
    size = max(0, len(data) - HEADER_BYTES)
    dense = random.randbytes(size)
    thin = bytes(a & b & c for a, b, c in zip(dense, random.randbytes(size), random.randbytes(size), strict=True))
    return data[:HEADER_BYTES] + (dense if random.random() < 0.5 else thin)


def _splice(random: Random, data: bytearray, real: Real) -> bytearray:
    """The beginning of one message and the end of another."""
    other = random.choice(corpus()).message
    at = random.choice((HEADER_BYTES, 8 * random.randrange(len(data) // 8 + 1)))
    return data[:at] + other[min(at, len(other)) :]


def _lay_end_to_end(random: Random, data: bytearray, real: Real) -> bytearray:
    """Two messages in one, as an all-gather passes them on; one of them may be wrong about its length."""
    second = bytearray(random.choice(corpus()).message)
    damaged = random.choice((data, second))
    if len(damaged) >= 8 and random.random() < 0.7:
        struct.pack_into("<Q", damaged, 0, random.choice((*_EXTREME, len(damaged) - 8, len(damaged) + 8)))
    return bytearray(8) + data + second


def _foreign_header(random: Random, data: bytearray, real: Real) -> bytearray:
    """Codes, count and sizes of another message, whose body has its length."""
    other = random.choice(corpus()).message
    body = (data[HEADER_BYTES:] * (len(other) // 8 + 1))[: len(other) - HEADER_BYTES]
    return bytearray(other[:HEADER_BYTES]) + (body or bytearray(other[HEADER_BYTES:]))


def _recode(random: Random, data: bytearray, real: Real) -> bytearray:
    """A header without a contradiction, whatever stands behind it."""
    code, values = random.choice(list(IndexCode)), random.randrange(4)
    count, low = random.randint(0, min(real.tag.span, 80)), random.choice((0, 1, 7, 8, 9, 16, 31, 32, 255))
    size = _stream_bytes(random, code, count, real.tag.span, low)
    stream = random.randbytes(size)
    if code is IndexCode.ELIAS_FANO:
        stream = _unary(random, stream, count, low)
    body = stream.ljust(padded(size), b"\0") + random.randbytes(padded(VALUE_WIDTHS[values] * count))
    message = bytearray(real.message[:HEADER_BYTES]) + body
    message[21:23] = bytes((code, values))
    struct.pack_into("<QQ", message, 64, count, size)
    message[84] = low
    return message


def _stream_bytes(random: Random, code: IndexCode, count: int, span: int, low: int) -> int:
    if code is IndexCode.ELIAS_FANO:
        return min(types.elias_fano_bytes(count, span, low), LONGEST)
    width = {IndexCode.RAW32: 4, IndexCode.RAW64: 8, IndexCode.DELTA16: 2, IndexCode.DELTA8: 1}.get(code, 0)
    return width * count + random.choice((0, 0, 0, 1, 2, 4, 8))


def _unary(random: Random, stream: bytes, count: int, low: int) -> bytes:
    """Low bits as they are, and as many ones as there are entries behind them, or nearly."""
    lows = min(len(stream), (count * low + 63) // 64 * 8)
    bits = 8 * (len(stream) - lows)
    ones = min(bits, max(0, count + random.choice((0, 0, 0, 0, -1, 1))))
    high = sum(1 << place for place in random.sample(range(bits), ones))
    return stream[:lows] + high.to_bytes(bits // 8, "little")


Change = Callable[[Random, bytearray, Real], bytearray]
_CHANGES: tuple[tuple[str, Change], ...] = (
    ("as it is", _as_it_is),
    ("bits flipped", _flip_bits),
    ("bits flipped", _flip_bits),
    ("bytes set", _set_bytes),
    ("header field set", _set_field),
    ("header field set", _set_field),
    ("cut", _cut),
    ("extended", _extend),
    ("random bytes", _noise),
    ("random body", _other_body),
    ("spliced", _splice),
    (END_TO_END, _lay_end_to_end),
    ("foreign header", _foreign_header),
    ("another code", _recode),
    ("another code", _recode),
)
