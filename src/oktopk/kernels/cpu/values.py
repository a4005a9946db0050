"""The codes of `kernels.values`, compiled: the same bytes, at most one nanosecond per value."""

from __future__ import annotations

import numpy as np

from ..values import E4M3_LARGEST, E4M3_SCALES, ValueCode
from .vector import as_bits, as_float, compiled

_BF16, _FP16, _E4M3 = int(ValueCode.BF16), int(ValueCode.FP16), int(ValueCode.E4M3)


@compiled
def _largest_bits(values):
    """The bits of the largest magnitude: positive floats are ordered like their bits."""
    largest = np.uint32(0)
    for j in range(values.size):
        bits = np.uint32(as_bits(values[j]) & np.uint32(0x7FFFFFFF))
        largest = bits if bits > largest else largest
    return largest


@compiled
def _fp16_scale(values):
    largest = _largest_bits(values)
    exponent = np.int64(largest >> 23) - 126 if largest else 0
    exponent = min(113, max(-126, exponent - 15))
    return as_float(np.uint32((exponent + 127) << 23))


@compiled
def _from_half(half, scale):
    magnitude = as_float(np.uint32((half & 0x7FFF) << 13)) * np.float32(2.0**112)
    value = magnitude * scale
    return -value if half & 0x8000 else value


@compiled
def _fp16_encode(values, scale, out, decoded):
    inverse = np.float32(1) / scale
    for j in range(values.size):
        bits = as_bits(values[j] * inverse)
        sign = np.uint32((bits >> 16) & 0x8000)
        bits = np.uint32(bits & 0x7FFFFFFF)
        normal = np.uint32(bits + np.uint32(0xC8000FFF) + np.uint32((bits >> 13) & 1)) >> 13
        # Adding a half shifts a subnormal half's bits to the bottom of the float, rounded on the way.
        small = as_bits(as_float(bits) + np.float32(0.5)) - np.uint32(0x3F000000)
        half = np.uint32(
            sign | (np.uint32(small) if bits < 0x38800000 else min(np.uint32(normal), np.uint32(0x77FF)))
        )
        out[j] = half
        decoded[j] = _from_half(half, scale)


@compiled
def _e4m3_scale(values):
    largest = as_float(min(_largest_bits(values), np.uint32(0x7F7FFFFF)))
    scale = largest / np.float32(E4M3_LARGEST)
    return min(max(scale, np.float32(E4M3_SCALES[0])), np.float32(E4M3_SCALES[1]))


@compiled
def _from_byte(byte, scale):
    code = np.uint32(byte & 0x7F)
    normal = as_float(np.uint32((code << 20) + np.uint32(112 << 23)))
    small = np.float32(np.int32(code)) * np.float32(2.0**-17)
    value = (small if code < 8 else normal) * scale
    return -value if byte & 0x80 else value


@compiled
def _e4m3_encode(values, scale, out, decoded):
    inverse = np.float32(1) / scale
    for j in range(values.size):
        bits = as_bits(values[j] * inverse)
        sign = np.uint32((bits >> 24) & 0x80)
        bits = np.uint32(bits & 0x7FFFFFFF)
        normal = (np.uint32(bits + np.uint32(0x7FFFF) + np.uint32((bits >> 20) & 1)) >> 20) - np.uint32(112 << 3)
        # Adding 64 leaves multiples of 2^-17 in the lowest bits.
        small = as_bits(as_float(bits) + np.float32(64)) - np.uint32(0x42800000)
        code = np.uint32(small) if bits < 0x38800000 else min(np.uint32(normal), np.uint32(0x7F))
        byte = np.uint32(sign | code)
        out[j] = byte
        decoded[j] = _from_byte(byte, scale)


@compiled
def _bf16_encode(values, out, decoded):
    for j in range(values.size):
        bits = as_bits(values[j])
        rounded = np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> 16) & 1)) >> 16
        overflow = (rounded & 0x7FFF) >= 0x7F80
        out[j] = rounded - overflow
        decoded[j] = as_float(np.uint32((rounded - overflow) << 16))


@compiled
def write_values(values, code, out, decoded):
    scale = np.float32(1)
    if code == _FP16:
        scale = _fp16_scale(values)
        _fp16_encode(values, scale, out.view(np.uint16), decoded)
    elif code == _E4M3:
        scale = _e4m3_scale(values)
        _e4m3_encode(values, scale, out, decoded)
    elif code == _BF16:
        _bf16_encode(values, out.view(np.uint16), decoded)
    else:
        floats = out.view(np.float32)
        for j in range(values.size):
            floats[j] = values[j]
            decoded[j] = values[j]
    return scale


@compiled
def read_values(stream, code, scale, out):
    if code == _FP16:
        halves = stream.view(np.uint16)
        for j in range(out.size):
            out[j] = _from_half(np.uint32(halves[j]), np.float32(scale))
    elif code == _E4M3:
        for j in range(out.size):
            out[j] = _from_byte(np.uint32(stream[j]), np.float32(scale))
    elif code == _BF16:
        upper = stream.view(np.uint16)
        for j in range(out.size):
            out[j] = as_float(np.uint32(upper[j]) << np.uint32(16))
    else:
        floats = stream.view(np.float32)
        for j in range(out.size):
            out[j] = floats[j]
