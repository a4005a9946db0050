"""Value codes in NumPy: the definition of the byte streams. `cpu.values` has the same codes compiled.

Lossy codes round to nearest, ties to even, and saturate: a finite value never becomes infinite. The encoder also
gives the values as receivers decode them, to the bit, so that the sender can keep the rounding error.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

VALUE_WIDTHS = (4, 2, 2, 1)
"""Bytes per value, by code."""


class ValueCode(IntEnum):
    """How the values of a message are encoded. FP16 and E4M3 divide by a scale, so that the largest value fits.

    E4M3 is a byte: sign, four bits of exponent, three of mantissa. All of its 256 codes are finite.
    """

    FP32 = 0
    BF16 = 1
    FP16 = 2
    E4M3 = 3

    @property
    def width(self) -> int:
        return VALUE_WIDTHS[self]


def write_values(values: Array, code: int, out: Array, decoded: Array) -> float:
    """Encode the values; `decoded` gets what receivers will decode. Returns the scale."""
    scale = 1.0
    if code == ValueCode.FP32:
        out.view(np.float32)[:] = values
    elif code == ValueCode.BF16:
        bf16_encode(values, out.view(np.uint16))
    elif code == ValueCode.FP16:
        scale = fp16_scale(values)
        fp16_encode(values, scale, out.view(np.uint16))
    else:
        scale = e4m3_scale(values)
        e4m3_encode(values, scale, out)
    read_values(out, code, scale, decoded)
    return scale


def read_values(stream: Array, code: int, scale: float, out: Array) -> None:
    if code == ValueCode.FP32:
        out[:] = stream.view(np.float32)
    elif code == ValueCode.BF16:
        bf16_decode(stream.view(np.uint16), out)
    elif code == ValueCode.FP16:
        fp16_decode(stream.view(np.uint16), scale, out)
    else:
        e4m3_decode(stream, scale, out)


def fp16_scale(values: Array) -> float:
    """A power of two that brings the largest magnitude into [2^14, 2^15), where fp16 cannot overflow."""
    largest = float(np.abs(values).max()) if values.size else 0.0
    return float(2.0 ** min(113, max(-126, int(np.frexp(largest)[1]) - 15)))


def fp16_encode(values: Array, scale: float, out: Array) -> None:
    """Encode values / scale as fp16 bits."""
    with np.errstate(all="ignore"):
        halves = (values * np.float32(1.0 / scale)).astype(np.float16).view(np.uint16)
    out[:] = np.minimum(halves & 0x7FFF, 0x77FF) | (halves & 0x8000)


def fp16_decode(stream: Array, scale: float, out: Array) -> None:
    magnitudes = ((stream & 0x7FFF).astype(np.uint32) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
    with np.errstate(over="ignore"):
        out[:] = magnitudes * np.float32(scale)
    out[stream >= 0x8000] *= -1


E4M3_LARGEST = 1.875
E4M3_SCALES = 2.0**-126, 2.0**127
"""Between these limits the scale, its inverse and all decoded values are finite."""


def e4m3_scale(values: Array) -> float:
    """The scale that maps the largest magnitude to the largest code.

    It is not rounded to a power of two: the values of all messages would then share a few levels, and many sums
    would be equal, so that no threshold could separate them.
    """
    largest = np.abs(values).max(initial=np.float32(0))
    smallest_scale, largest_scale = E4M3_SCALES
    return float(np.fmin(np.fmax(largest / np.float32(E4M3_LARGEST), smallest_scale), largest_scale))


def e4m3_encode(values: Array, scale: float, out: Array) -> None:
    """Round values / scale, which is below 2, to four significant bits; below 2^-14 to multiples of 2^-17."""
    with np.errstate(all="ignore"):
        magnitudes = np.abs(values) * (np.float32(1) / np.float32(scale))
        exponents = np.frexp(np.maximum(magnitudes, np.float32(2.0**-14)))[1]
        codes = np.rint(np.ldexp(magnitudes, 4 - exponents)) + 8 * (exponents + 13)
    out[:] = np.fmin(codes, 0x7F).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)


def e4m3_decode(stream: Array, scale: float, out: Array) -> None:
    codes = (stream & 0x7F).astype(np.int32)
    exponents = np.maximum(codes >> 3, 1)
    out[:] = np.ldexp(np.float32(codes - 8 * (exponents - 1)), exponents - 18) * np.float32(scale)
    out[stream >= 0x80] *= -1


def bf16_encode(values: Array, out: Array) -> None:
    """Keep the upper halves of the floats, rounded to nearest even. The largest round down, never to infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    overflow = (rounded & np.uint32(0x7FFF)) >= 0x7F80
    out[:] = rounded - overflow


def bf16_decode(stream: Array, out: Array) -> None:
    out.view(np.uint32)[:] = stream.astype(np.uint32) << np.uint32(16)
