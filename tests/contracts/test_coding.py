"""The compiled codes write the bytes of the NumPy definition, read them back, and survive any stream."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oktopk.kernels import coding, types
from oktopk.kernels.coding import IndexCode
from oktopk.kernels.cpu import coding as coding_cpu
from oktopk.kernels.values import Array, ValueCode

BACKENDS = [coding, coding_cpu]
SIZES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 1009]
LAST = 2**31 - 1
LARGEST = np.finfo(np.float32).max
TINY = np.finfo(np.float32).tiny
GUARD = 8


def name(parameter: Any) -> str:
    return str(getattr(parameter, "name", None) or parameter.__name__.rpartition(".")[2])


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)))


# --- index sets ----------------------------------------------------------------------------------------------


class Region:
    """Increasing indices of [start, start + span)."""

    def __init__(self, gaps: list[int], slack: int, start: int, dtype: type = np.int32) -> None:
        offsets = np.cumsum(np.array(gaps, np.int64) + 1) - 1
        offsets = offsets[offsets <= LAST - 1]
        self.span = min(LAST, int(offsets[-1]) + 1 + slack if offsets.size else slack)
        self.start = start if dtype is np.int64 else min(start, LAST - self.span)
        self.indices = (offsets + self.start).astype(dtype)

    def __repr__(self) -> str:
        return f"Region({self.indices!r}, start={self.start}, span={self.span})"

    @property
    def tightest(self) -> int:
        """Low bits with which the high parts take about two bits per entry."""
        return max(0, (self.span // max(1, self.indices.size)).bit_length() - 1)


edge_gaps = st.sampled_from([254, 255, 256, 65534, 65535, 65536])
gap = st.one_of(st.integers(0, 3), st.integers(0, 1000), edge_gaps, st.integers(0, LAST))
regions = st.builds(
    Region,
    st.one_of(st.lists(gap, max_size=60), st.lists(st.integers(0, 300), max_size=60)),
    st.sampled_from([0, 1, 63, 64, 65, 10**5, LAST]),
    st.sampled_from([0, 1, 77, 2**24 + 1, 2**33]),
    st.sampled_from([np.int32, np.int64]),
)
LAST_INDEX = Region([LAST - 1], 0, 0)
FAR_APART = Region([0, LAST - 2], 0, 0)


def random_region(size: int, span: int, start: int = 0, dtype: type = np.int32, seed: int = 0) -> Region:
    """`size` indices anywhere in a region of `span`."""
    rng = np.random.default_rng(seed)
    offsets = np.sort(rng.choice(span, size, replace=False)) if size else np.zeros(0, np.int64)
    slack = span - 1 - int(offsets[-1]) if size else span
    return Region(list(np.diff(offsets, prepend=-1) - 1), slack, start, dtype)


def low_bits(region: Region, code: IndexCode) -> int:
    return region.tightest if code is IndexCode.ELIAS_FANO else 0


def index_bytes(region: Region, code: IndexCode, low: int) -> int:
    count = region.indices.size
    one, two = coding.escapes(region.indices, region.start)
    return {
        IndexCode.RAW32: 4 * count,
        IndexCode.RAW64: 8 * count,
        IndexCode.DELTA8: count + 4 * one,
        IndexCode.DELTA16: 2 * count + 4 * two,
        IndexCode.ELIAS_FANO: 8 * sum(types.elias_fano_words(count, region.span, low)),
        IndexCode.FULL: 0,
    }[code]


def written(codes: ModuleType, region: Region, code: IndexCode, low: int) -> Array:
    """The stream; the elements around it must stay as they are."""
    size = index_bytes(region, code, low)
    memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)
    codes.write_indices(region.indices, int(code), low, region.start, region.span, memory[GUARD : GUARD + size])
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + size :] == 0xA5).all()
    return memory[GUARD : GUARD + size].copy()


def read(
    codes: ModuleType, stream: Array, code: int, low: int, start: int, span: int, count: int, dtype: type
) -> Array | None:
    """What the decoder makes of a stream, None if it refuses; it may write nowhere but where it should."""
    memory = np.full(count + 2 * GUARD, -1234567, dtype)
    good = codes.read_indices(stream, code, low, start, span, memory[GUARD : GUARD + count])
    assert (memory[:GUARD] == -1234567).all()
    assert (memory[GUARD + count :] == -1234567).all()
    return memory[GUARD : GUARD + count] if good else None


def assert_round_trip(region: Region, code: IndexCode, low: int) -> None:
    streams = [written(codes, region, code, low) for codes in BACKENDS]
    assert same(*streams)
    count, dtype = region.indices.size, region.indices.dtype.type
    for codes in BACKENDS:
        found = read(codes, streams[0], code, low, region.start, region.span, count, dtype)
        assert found is not None
        assert found.tolist() == region.indices.tolist()


WRITTEN = [code for code in IndexCode if code is not IndexCode.FULL]


@pytest.mark.parametrize("code", WRITTEN, ids=name)
@given(region=regions)
@example(region=LAST_INDEX)
@example(region=FAR_APART)
def test_indices_round_trip(code: IndexCode, region: Region) -> None:
    """Both backends write the same bytes and read the same indices back."""
    assert_round_trip(region, code, low_bits(region, code))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("density", [0.9, 0.3, 1e-2, 1e-3])
@pytest.mark.parametrize("code", WRITTEN, ids=name)
def test_indices_round_trip_at_any_density(code: IndexCode, density: float, dtype: type) -> None:
    for size in SIZES:
        region = random_region(size, max(1, int(size / density)), 12345, dtype, size)
        assert_round_trip(region, code, low_bits(region, code))


@pytest.mark.parametrize("low", range(32))
def test_elias_fano_with_any_number_of_low_bits(low: int) -> None:
    """However many of them straddle a word, and however full the last words are."""
    for size in SIZES:
        span = min(LAST, max(size, 3) << low)
        assert_round_trip(random_region(size, span, start=1000, seed=low), IndexCode.ELIAS_FANO, low)


@pytest.mark.parametrize("span", SIZES)
def test_a_full_region_needs_no_stream(span: int) -> None:
    region = Region([0] * span, 0, 77)
    assert_round_trip(region, IndexCode.FULL, 0)
    for codes in BACKENDS:
        assert read(codes, np.zeros(0, np.uint8), IndexCode.FULL, 0, 77, span + 1, span, np.int32) is None
        assert read(codes, np.zeros(8, np.uint8), IndexCode.FULL, 0, 77, span, span, np.int32) is None


@given(regions)
@example(LAST_INDEX)
def test_escapes_are_the_long_gaps(region: Region) -> None:
    gaps = np.diff(region.indices.astype(np.int64), prepend=region.start - 1) - 1
    expected = (int((gaps >= 255).sum()), int((gaps >= 65535).sum()))
    for codes in BACKENDS:
        assert tuple(codes.escapes(region.indices, region.start)) == expected


# --- streams from nowhere ------------------------------------------------------------------------------------


def assert_same_answer(
    stream: Array, code: int, low: int, start: int, span: int, count: int, dtype: type = np.int32
) -> None:
    """Both refuse, or both read the same strictly increasing indices of the region."""
    slow, fast = (read(codes, stream, code, low, start, span, count, dtype) for codes in BACKENDS)
    assert (slow is None) == (fast is None)
    for found in (slow, fast):
        if found is not None:
            assert all(start <= i < start + span for i in found.tolist())
            assert (found[1:] > found[:-1]).all()
    if slow is not None and fast is not None:
        assert slow.tolist() == fast.tolist()


@pytest.mark.parametrize("code", list(IndexCode), ids=name)
@given(
    stream=st.one_of(st.binary(max_size=64), st.lists(st.integers(0, 2), max_size=64).map(bytes)),
    low=st.integers(0, 40),
    start=st.sampled_from([0, 5, 2**20]),
    span=st.one_of(st.integers(0, 300), st.sampled_from([2**16, 2**28, LAST - 2**20])),
    count=st.integers(0, 20),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_a_random_stream(
    code: IndexCode, stream: bytes, low: int, start: int, span: int, count: int, dtype: type
) -> None:
    padded = np.frombuffer(stream + bytes(-len(stream) % 8), np.uint8)
    for size in {padded.size, len(stream)}:
        assert_same_answer(padded[:size].copy(), code, low, start, span, count, dtype)


@pytest.mark.parametrize("code", list(IndexCode), ids=name)
@given(data=st.data(), region=regions)
def test_a_damaged_stream(code: IndexCode, data: st.DataObject, region: Region) -> None:
    """A valid stream with some bits flipped, or read with another count or span."""
    low = low_bits(region, code)
    stream = written(coding, region, code, low)
    places = st.lists(st.integers(0, 8 * stream.size - 1), max_size=3) if stream.size else st.just([])
    for place in data.draw(places):
        stream[place // 8] ^= 1 << place % 8
    count = max(0, region.indices.size + data.draw(st.sampled_from([0, 0, 0, -1, 1])))
    span = max(0, region.span - data.draw(st.sampled_from([0, 0, 1, 1000])))
    assert_same_answer(stream, code, low, region.start, span, count, region.indices.dtype.type)


@pytest.mark.parametrize("low", [28, 29, 30, 31])
def test_high_parts_beyond_32_bits_are_refused(low: int) -> None:
    """An index of 2^32 + 5 is not 5."""
    for high in range(64):
        words = np.array([5, 1 << high], np.uint64)
        assert_same_answer(words.view(np.uint8), IndexCode.ELIAS_FANO, low, 0, LAST, 1)


NOT_INCREASING = [[0, 2**63 - 1, -(2**63)], [5, 2**62, -(2**63), 0], [-1, 3], [2**40], [4, 4], [4, 3]]


@pytest.mark.parametrize("offsets", NOT_INCREASING)
def test_differences_that_overflow_are_not_increases(offsets: list[int]) -> None:
    stream = np.array(offsets, np.int64).view(np.uint8)
    for codes in BACKENDS:
        assert read(codes, stream, IndexCode.RAW64, 0, 0, 2**40, len(offsets), np.int64) is None


# --- values --------------------------------------------------------------------------------------------------


def finite_floats(seed: int, size: int) -> Array:
    """Any finite float32: random bits with any exponent but the last."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size, np.uint64).astype(np.uint32)
    bits[bits & 0x7F800000 == 0x7F800000] &= 0x807FFFFF
    return bits.view(np.float32)


def around(seed: int, size: int, exponent: int) -> Array:
    """Magnitudes from 2^exponent down over forty binary orders, as far as floats go."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.0, 1.0], size) * 2.0 ** (exponent - 40 * rng.random(size))
    return np.clip(values, -float(LARGEST), float(LARGEST)).astype(np.float32)


def halfway(seed: int, size: int) -> Array:
    """Normal numbers that lie on, or just off, the middle between two neighbours of the short formats."""
    rng = np.random.default_rng(seed)
    tails = rng.choice([0x0000, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], size)
    heads = (
        (rng.integers(118, 132, size) << 23)
        + (rng.integers(0, 2, size) << 31)
        + (rng.integers(0, 128, size) << 16)
    )
    return (heads + tails).astype(np.uint32).view(np.float32)


odd = [0.0, -0.0, 1.0, -1.0, 65504.0, 65520.0, 1e-45, -1e-45, TINY, -TINY, TINY / 2, 1 / 3, LARGEST, -LARGEST]
seeds, sizes = st.integers(0, 2**16), st.sampled_from(SIZES)


def array(values: list[float]) -> Array:
    return np.array(values, np.float32)


value_arrays = st.one_of(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70).map(array),
    st.lists(st.sampled_from(odd), max_size=70).map(array),
    st.builds(finite_floats, seeds, sizes),
    st.builds(halfway, seeds, sizes),
    st.builds(around, seeds, sizes, st.integers(-149, 128)),
)


def coded(codes: ModuleType, values: Array, code: ValueCode) -> tuple[Array, float, Array]:
    """The stream, the scale, and what the receiver will see."""
    out, decoded = np.zeros(values.size * code.width, np.uint8), np.empty_like(values)
    scale = codes.write_values(values, int(code), out, decoded)
    return out, float(scale), decoded


def decoded_by(codes: ModuleType, stream: Array, code: ValueCode, scale: float, count: int) -> Array:
    memory = np.full(count + 2 * GUARD, 7, np.float32)
    codes.read_values(stream, int(code), scale, memory[GUARD : GUARD + count])
    assert (memory[:GUARD] == 7).all()
    assert (memory[GUARD + count :] == 7).all()
    return memory[GUARD : GUARD + count]


@pytest.mark.parametrize("code", list(ValueCode), ids=name)
@given(values=value_arrays)
def test_values_have_the_same_bytes(code: ValueCode, values: Array) -> None:
    """Same stream, same scale; and both senders know what either receiver will see."""
    slow, fast = (coded(codes, values, code) for codes in BACKENDS)
    assert same(slow[0], fast[0])
    assert slow[1] == fast[1]
    for codes in BACKENDS:
        seen = decoded_by(codes, slow[0], code, slow[1], values.size)
        assert same(seen, slow[2])
        assert same(seen, fast[2])


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@pytest.mark.parametrize("code", list(ValueCode), ids=name)
@given(values=value_arrays)
@example(values=np.array([LARGEST, -LARGEST], np.float32))
@example(values=np.array([LARGEST * np.float32(1 - 2**-12)], np.float32))
def test_a_finite_value_stays_finite(code: ValueCode, codes: ModuleType, values: Array) -> None:
    """Rounding never makes an infinity, keeps the sign, and is exact for fp32."""
    seen = coded(codes, values, code)[2]
    assert np.isfinite(seen).all()
    assert (np.signbit(seen) == np.signbit(values)).all()
    assert code is not ValueCode.FP32 or same(seen, values)


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@given(values=value_arrays)
@example(values=np.array([LARGEST, 1.0], np.float32))
@example(values=np.array([TINY, -2 * TINY], np.float32))
def test_fp16_keeps_eleven_bits(codes: ModuleType, values: Array) -> None:
    """Relative error at most 2^-11 for every normal number within 2^-28 of the largest."""
    seen = coded(codes, values, ValueCode.FP16)[2].astype(np.float64)
    exact = values.astype(np.float64)
    magnitude = np.abs(exact)
    near = magnitude >= max(magnitude.max(initial=0.0) * 2.0**-28, float(TINY))
    assert (np.abs(seen - exact)[near] <= 2.0**-11 * magnitude[near]).all()


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@given(values=value_arrays)
def test_e4m3_keeps_four_bits(codes: ModuleType, values: Array) -> None:
    """Relative error at most 2^-4 down to 2^-14 of the largest; smaller ones are off by no more than that one."""
    seen = coded(codes, values, ValueCode.E4M3)[2].astype(np.float64)
    exact = values.astype(np.float64)
    magnitude = np.abs(exact)
    coarsest = np.maximum(magnitude, max(magnitude.max(initial=0.0) * 2.0**-14, float(TINY)))
    assert (np.abs(seen - exact) <= 2.0**-4 * coarsest).all()


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@given(values=value_arrays)
def test_e4m3_rounds_to_the_nearest(codes: ModuleType, values: Array) -> None:
    """No other code is nearer by more than float32 can tell. Zero has a code, so zeros are exact."""
    stream, scale, seen = coded(codes, values, ValueCode.E4M3)
    every = decoded_by(codes, np.arange(128, dtype=np.uint8), ValueCode.E4M3, scale, 128).astype(np.float64)
    assert every[0] == 0
    assert (np.diff(every) > 0).all()
    magnitude = np.abs(values.astype(np.float64))
    distance = np.abs(magnitude[:, None] - every)
    nearest = distance.min(1) + 2.0**-20 * magnitude
    assert (distance[np.arange(values.size), stream & 0x7F] <= nearest).all()
    assert (seen[values == 0] == 0).all()


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
def test_e4m3_rounds_ties_to_even(codes: ModuleType) -> None:
    """Every middle between two codes, with a largest value that makes the scale 1."""
    every = decoded_by(codes, np.arange(128, dtype=np.uint8), ValueCode.E4M3, 1.0, 128)
    stream, scale, _ = coded(codes, np.append((every[1:] + every[:-1]) / 2, every[-1]), ValueCode.E4M3)
    assert scale == 1.0
    lower = np.arange(127)
    assert (stream[:-1] == lower + lower % 2).all()
    assert stream[-1] == 127


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@given(values=value_arrays)
@example(values=np.array([LARGEST], np.float32))
def test_e4m3_fits_the_largest(codes: ModuleType, values: Array) -> None:
    """It has the largest code, and comes back as it was, if its scale is neither the least nor the most."""
    stream, scale, seen = coded(codes, values, ValueCode.E4M3)
    if 2.0**-126 < scale < 2.0**127:
        largest = np.abs(values).argmax()
        assert stream[largest] & 0x7F == 0x7F
        assert seen[largest] == pytest.approx(values[largest], rel=2.0**-22)


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
def test_e4m3_of_two_messages_has_other_levels(codes: ModuleType) -> None:
    """Equal levels everywhere would make ties of most sums, which no threshold tells apart."""
    rng = np.random.default_rng(0)
    one, two = (
        np.abs(coded(codes, rng.standard_normal(1000).astype(np.float32), ValueCode.E4M3)[2]) for _ in "ab"
    )
    assert np.intersect1d(one, two).size == 0


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
def test_e4m3_of_a_selection_is_off_by_a_fortieth(codes: ModuleType) -> None:
    """The mean relative error on the largest 1 % of heavy-tailed values, which is what travels."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(10**5) * np.exp(rng.standard_normal(10**5))).astype(np.float32)
    values = values[np.abs(values) >= np.quantile(np.abs(values), 0.99)]
    seen = coded(codes, values, ValueCode.E4M3)[2]
    assert np.mean(np.abs(seen - values) / np.abs(values)) < 1 / 40


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@pytest.mark.parametrize("scale", [2.0**-126, 1.0, 2.0**127, -(2.0**127)])
def test_every_byte_is_a_finite_value(scale: float, codes: ModuleType) -> None:
    """Also with the largest scale that a receiver accepts."""
    every = np.arange(256, dtype=np.uint8)
    assert np.isfinite(decoded_by(codes, every, ValueCode.E4M3, scale, 256)).all()


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@given(values=value_arrays)
def test_fp16_fits_the_largest(codes: ModuleType, values: Array) -> None:
    """The scale is a power of two, and no half is an infinity or a NaN."""
    stream, scale, _ = coded(codes, values, ValueCode.FP16)
    assert math.frexp(scale)[0] == 0.5
    assert (stream.view(np.uint16) & 0x7C00 != 0x7C00).all()


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@given(values=value_arrays)
def test_bf16_keeps_eight_bits(codes: ModuleType, values: Array) -> None:
    """Relative error at most 2^-8 for every normal number: the ones next to infinity round down."""
    seen = coded(codes, values, ValueCode.BF16)[2].astype(np.float64)
    exact = values.astype(np.float64)
    near = np.abs(exact) >= TINY
    assert (np.abs(seen - exact)[near] <= 2.0**-8 * np.abs(exact)[near]).all()


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@pytest.mark.parametrize("code", list(ValueCode), ids=name)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_no_harm(bad: float, code: ValueCode, codes: ModuleType) -> None:
    """A flag says that a message is void; until it is read, its values travel without an error or a warning."""
    stream, scale, _ = coded(codes, array([bad, 1e30, 1.0, 0.0]), code)
    assert math.isfinite(scale)
    decoded_by(codes, stream, code, scale, 4)


@pytest.mark.parametrize("code", [ValueCode.FP16, ValueCode.E4M3], ids=name)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**112, 1 / 3])
def test_every_code_is_read_alike(scale: float, code: ValueCode) -> None:
    """Also those that no sender writes: a receiver with Numba and one without must agree on the bits."""
    every = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    with np.errstate(all="ignore"):
        slow, fast = (decoded_by(codes, every, code, scale, every.size // code.width) for codes in BACKENDS)
    assert same(slow, fast)


@pytest.mark.parametrize("code", list(ValueCode), ids=name)
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_any_stream_of_values_is_read_alike(code: ValueCode, words: list[int]) -> None:
    stream = np.array(words, np.uint32).view(np.uint8)
    count = stream.size // code.width
    assert same(*(decoded_by(codes, stream, code, 1.0, count) for codes in BACKENDS))


# --- checksum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(70))
def test_checksums_are_equal(size: int) -> None:
    words = np.random.default_rng(size).integers(0, 2**64, size, np.uint64)
    for seed in (0, 88, 2**40 + 1):
        assert coding.checksum(words, seed) == coding_cpu.checksum(words, seed)


def flipped(words: Array, bit: int, *places: int) -> Array:
    other = words.copy()
    other[list(places)] ^= np.uint64(1) << np.uint64(bit)
    return other


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33])
def test_every_single_bit_matters(codes: ModuleType, size: int) -> None:
    words = np.random.default_rng(size).integers(0, 2**64, size, np.uint64)
    right = codes.checksum(words, 0)
    assert all(codes.checksum(flipped(words, bit, j), 0) != right for j in range(size) for bit in range(64))


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
@pytest.mark.parametrize("bit", [0, 1, 31, 32, 61, 62, 63])
def test_the_same_bit_of_two_words_matters(codes: ModuleType, bit: int) -> None:
    """A line that sticks: also the top bit, which a multiplication leaves where it is."""
    words = np.random.default_rng(bit).integers(0, 2**64, 50, np.uint64)
    right = codes.checksum(words, 0)
    for first, second in ((0, 1), (0, 15), (0, 16), (3, 35), (30, 46), (33, 49)):
        assert codes.checksum(flipped(words, bit, first, second), 0) != right


@pytest.mark.parametrize("codes", BACKENDS, ids=name)
def test_length_order_and_seed_matter(codes: ModuleType) -> None:
    """Words appended (zeros too), swapped between lanes or within one, another seed: another checksum."""
    words = np.arange(40, dtype=np.uint64)
    variants = [words, words[:39], np.append(words, np.uint64(0)), words[::-1].copy(), np.roll(words, 16)]
    swapped = words.copy()
    swapped[[3, 19]] = swapped[[19, 3]]
    checksums = [codes.checksum(v, 0) for v in [*variants, swapped]]
    assert len({*checksums, codes.checksum(words, 1)}) == len(checksums) + 1
