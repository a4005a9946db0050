"""Messages come back as their sender says; anything else that arrives is refused."""

from __future__ import annotations

import math
import struct
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk.errors import WireError
from oktopk.kernels import coding
from oktopk.kernels.cpu import coding as coding_cpu
from oktopk.wire import message as wire
from oktopk.wire.message import HEADER_BYTES, IndexCode, Tag, ValueCode
from oktopk.wire.sparse_vector import SparseVector

BACKENDS = [coding, coding_cpu]
LARGE = [2**31 - 1, 2**31, 2**31 + 10, 2**40]
LENGTH, CHECKSUM, MAGIC, PHASE, INDEX_CODE, VALUE_CODE, FLAGS = 0, 8, 16, 20, 21, 22, 23
STEP, BUCKET, SENDER, SIZE, START, SPAN, COUNT, INDEX_BYTES, SCALE, LOW = 24, 32, 36, 40, 48, 56, 64, 72, 80, 84


def name(parameter: Any) -> str:
    return str(getattr(parameter, "name", None) or parameter.__name__.rpartition(".")[2])


every_code = pytest.mark.parametrize("code", list(ValueCode), ids=name)
every_backend = pytest.mark.parametrize("codes", BACKENDS, ids=name)


# --- messages and their surgery ------------------------------------------------------------------------------


def vector(indices: Any, size: int, seed: int = 0) -> SparseVector:
    """Random values at the given indices."""
    dtype = torch.int32 if size < 2**31 else torch.int64
    at = torch.as_tensor(indices, dtype=torch.int64).to(dtype)
    return SparseVector(at, torch.randn(at.numel(), generator=torch.Generator().manual_seed(seed)), size)


def tag_for(size: int, start: int = 0, span: int | None = None) -> Tag:
    return Tag(step=7, bucket=3, phase=1, sender=2, size=size, start=start, span=size if span is None else span)


def small_message(code: ValueCode = ValueCode.FP32, **options: bool) -> tuple[Tensor, Tag]:
    tag = tag_for(1000)
    return wire.encode(vector([3, 5, 400, 401, 999], 1000), tag, code, **options)[0], tag


def patched(message: Tensor, *fields: tuple[int, str, Any]) -> Tensor:
    """The message with (offset, struct format, value) written into it, and a checksum that is right again."""
    data = message.clone().numpy()
    for offset, form, value in fields:
        struct.pack_into(form, data.data, offset, value)
    struct.pack_into("<Q", data.data, CHECKSUM, wire._checksum(data))
    return torch.from_numpy(data)


def resized(message: Tensor, size: int) -> Tensor:
    """Cut or padded with zeros to `size` bytes, which it then also says."""
    data = np.zeros(size, np.uint8)
    data[: message.numel()] = message.numpy()[:size]
    return patched(torch.from_numpy(data), (LENGTH, "<Q", size))


def field(message: Tensor, offset: int, form: str) -> Any:
    return struct.unpack_from(form, message.numpy().data, offset)[0]


def crafted(offsets: list[int], span: int = 1000, code: IndexCode = IndexCode.RAW32) -> tuple[Tensor, Tag]:
    """A well-formed message with these raw offsets, whatever they are."""
    tag = tag_for(max(span, 1000), 0, span)
    width, dtype = (4, np.uint32) if code is IndexCode.RAW32 else (8, np.int64)
    body = np.array(offsets, np.int64).astype(dtype).view(np.uint8)
    size = HEADER_BYTES + (body.size + 7) // 8 * 8 + (4 * len(offsets) + 7) // 8 * 8
    data = np.zeros(size, np.uint8)
    data[:HEADER_BYTES] = wire.encode(SparseVector.empty(tag.size), tag, ValueCode.FP32)[0].numpy()[:HEADER_BYTES]
    data[HEADER_BYTES : HEADER_BYTES + body.size] = body
    fields = [(LENGTH, "<Q", size), (INDEX_CODE, "B", code), (COUNT, "<Q", len(offsets))]
    return patched(torch.from_numpy(data), *fields, (INDEX_BYTES, "<Q", width * len(offsets))), tag


def assert_refused(message: Tensor, tag: Tag, reason: str = ".") -> None:
    for codes in BACKENDS:
        with mock.patch.object(wire, "codes", codes), pytest.raises(WireError, match=reason):
            wire.decode(message, tag)


# --- round trips ---------------------------------------------------------------------------------------------


def assert_round_trip(part: SparseVector, tag: Tag, code: ValueCode, raw: bool = False) -> Tensor:
    """The receiver sees the indices, and the values that encode said it would; in no more than the capacity."""
    messages = []
    for codes in BACKENDS:
        with mock.patch.object(wire, "codes", codes):
            message, seen = wire.encode(part, tag, code, raw_indices=raw, blocked=0.25)
            vector, nonfinite, blocked = wire.decode(message, tag)
        assert vector.indices.dtype == part.indices.dtype
        assert torch.equal(vector.indices, part.indices)
        assert torch.equal(vector.values.view(torch.int32), seen.view(torch.int32))
        assert (vector.size, nonfinite) == (part.size, False)
        assert blocked == pytest.approx(0.25, abs=20e-6)
        assert message.numel() % 8 == 0
        assert message.numel() <= wire.max_message_bytes(len(part), tag.span, code)
        messages.append(message)
    assert torch.equal(*messages)
    return messages[0]


@st.composite
def parts(draw: st.DrawFn) -> tuple[SparseVector, Tag]:
    """Any number of entries in any region of a vector of any size."""
    size = draw(st.one_of(st.integers(0, 300), st.integers(0, 10**6), st.sampled_from(LARGE)))
    start = draw(st.integers(0, size))
    span = draw(st.integers(0, size - start))
    count = draw(st.integers(0, min(span, 300)))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    window = min(span, draw(st.sampled_from([count, 3 * count + 1, 1000 * count + 1, 2**62])))
    first = draw(st.integers(0, span - window))
    offsets = np.sort(rng.choice(window, count, replace=False)) + first if count else []
    return vector(np.asarray(offsets, np.int64) + start, size, seed), tag_for(size, start, span)


@every_code
@given(part_and_tag=parts(), raw=st.booleans())
def test_round_trip(code: ValueCode, part_and_tag: tuple[SparseVector, Tag], raw: bool) -> None:
    part, tag = part_and_tag
    message = assert_round_trip(part, tag, code, raw)
    if code is ValueCode.FP32:
        assert torch.equal(wire.decode(message, tag).vector.values, part.values)


SHAPES = {
    "nothing of nothing": ([], 0, 0, 0),
    "nothing": ([], 100, 0, 100),
    "nothing of an empty region": ([], 100, 40, 0),
    "everything": (range(100), 100, 0, 100),
    "a full region": (range(31, 64), 100, 31, 33),
    "the first": ([0], 97, 0, 97),
    "the last": ([96], 97, 0, 97),
    "one entry of one": ([40], 100, 40, 1),
    "a region in the middle": ([40, 41, 59], 100, 40, 20),
    "odd indices above 2^24": (range(2**24 + 1, 2**24 + 4000, 2), 2**25 + 1, 0, 2**25 + 1),
    "the last of 32 bits": ([2**31 - 2], 2**31 - 1, 0, 2**31 - 1),
    "the ends of 32 bits": ([0, 2**31 - 2], 2**31 - 1, 0, 2**31 - 1),
    "beyond 32 bits": ([0, 2**31 - 1, 2**31, 2**31 + 9], 2**31 + 10, 0, 2**31 + 10),
    "a small region beyond 32 bits": ([2**31 + 1, 2**31 + 9], 2**31 + 10, 2**31, 10),
    "a full region beyond 32 bits": (range(2**31, 2**31 + 10), 2**31 + 10, 2**31, 10),
    "terabytes": ([1, 2**32, 2**40 - 1], 2**40, 0, 2**40),
    "the end of terabytes": (range(2**40 - 99, 2**40, 2), 2**40, 2**40 - 1000, 1000),
}


@every_code
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_of_odd_shapes(shape: str, code: ValueCode) -> None:
    indices, size, start, span = SHAPES[shape]
    part = vector(list(indices), size)
    message = assert_round_trip(part, tag_for(size, start, span), code)
    assert wire.decode(message, tag_for(size, start, span)).vector.indices.tolist() == list(indices)


@every_code
def test_the_message_names_itself(code: ValueCode) -> None:
    """Length, magic, codes, tag and count stand where the table in the module says."""
    for nonfinite in (False, True):
        message, tag = small_message(code, nonfinite=nonfinite)
        assert field(message, LENGTH, "<Q") == message.numel()
        assert message[MAGIC : MAGIC + 4].numpy().tobytes() == b"okt1"
        assert field(message, VALUE_CODE, "B") == code
        assert field(message, FLAGS, "B") == int(nonfinite)
        header = [
            (STEP, "<Q"),
            (BUCKET, "<I"),
            (PHASE, "B"),
            (SENDER, "<I"),
            (SIZE, "<Q"),
            (START, "<Q"),
            (SPAN, "<Q"),
        ]
        assert Tag(*(field(message, offset, form) for offset, form in header)) == tag
        assert field(message, COUNT, "<Q") == 5
        assert wire.decode(message, tag).nonfinite is nonfinite


def test_an_empty_part_still_carries_the_flag() -> None:
    tag = tag_for(100)
    message, seen = wire.encode(SparseVector.empty(100), tag, ValueCode.FP16, nonfinite=True)
    assert message.numel() == HEADER_BYTES == 88
    assert wire.decode(message, tag).nonfinite
    assert seen.numel() == 0


@every_code
@given(
    count=st.integers(0, 2000),
    span=st.one_of(st.integers(0, 5000), st.sampled_from(LARGE)),
    slack=st.integers(0, 50),
)
def test_capacity_never_falls(code: ValueCode, count: int, span: int, slack: int) -> None:
    """Room for more entries, or for a larger region, is room for these."""
    assert wire.max_message_bytes(count, span, code) <= wire.max_message_bytes(count + slack, span + slack, code)
    assert wire.max_message_bytes(count, span, code) % 8 == 0


def assert_no_worse_than_raw(part: SparseVector, tag: Tag) -> None:
    code, size, _ = wire.best_index_code(part.indices.numpy(), tag.start, tag.span)
    assert size <= (4 if tag.span < 2**31 else 8) * len(part)
    assert (code is IndexCode.FULL) == (len(part) == tag.span)
    raw = wire.best_index_code(part.indices.numpy(), tag.start, tag.span, raw=True)
    assert raw[0] in (IndexCode.RAW32, IndexCode.RAW64, IndexCode.FULL)
    assert raw[1] >= size


@given(parts())
def test_the_best_code_is_never_worse_than_raw(part_and_tag: tuple[SparseVector, Tag]) -> None:
    """Time is weighed too, but never so that more than four bytes per index travel (eight beyond 2^31)."""
    assert_no_worse_than_raw(*part_and_tag)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_code_of_odd_shapes_is_no_worse_than_raw(shape: str) -> None:
    indices, size, start, span = SHAPES[shape]
    assert_no_worse_than_raw(vector(list(indices), size), tag_for(size, start, span))


@pytest.mark.parametrize(("density", "bits"), [(0.5, 9), (0.1, 9), (0.01, 13), (0.001, 17)])
def test_indices_are_coded_short(density: float, bits: float) -> None:
    """Bits per index at some density: not far above the entropy, far below the 32 of raw ones."""
    span, count = int(10_000 / density), 10_000
    indices = np.sort(np.random.default_rng(0).choice(span, count, replace=False)).astype(np.int32)
    assert 8 * wire.best_index_code(indices, 0, span)[1] <= bits * count


# --- damage --------------------------------------------------------------------------------------------------


@every_code
def test_a_message_cut_at_any_length_is_refused(code: ValueCode) -> None:
    """As it is, and also if what is left claims to be whole."""
    message, tag = small_message(code)
    for length in range(message.numel()):
        assert_refused(message[:length], tag)
    for length in range(HEADER_BYTES, message.numel(), 8):
        assert_refused(resized(message, length), tag)


@every_code
def test_a_message_with_more_behind_it_is_refused(code: ValueCode) -> None:
    message, tag = small_message(code)
    for extra in range(1, 33):
        assert_refused(torch.cat([message, torch.zeros(extra, dtype=torch.uint8)]), tag)
    for extra in (8, 16, 64):
        assert_refused(resized(message, message.numel() + extra), tag)


@every_code
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_damaged_byte_is_noticed(mask: int, code: ValueCode) -> None:
    message, tag = small_message(code)
    for place in range(message.numel()):
        damaged = message.clone()
        damaged[place] ^= mask
        assert_refused(damaged, tag)


@pytest.mark.parametrize("wrong", [f"{field}={value}" for field in Tag._fields for value in ("less", "more")])
def test_a_message_for_somebody_else_is_refused(wrong: str) -> None:
    message, tag = small_message()
    which, _, how = wrong.partition("=")
    other = tag._replace(**{which: getattr(tag, which) + (1 if how == "more" else -1)})
    assert_refused(message, other, "unexpected message")


BAD_OFFSETS = {
    "falling": [5, 4],
    "repeated": [5, 5],
    "beyond the region": [5, 1000],
    "far beyond": [2**32 - 1],
    "falling at the end": [0, 1, 2, 999, 998],
    "repeated first": [0, 0, 7],
}


@pytest.mark.parametrize("kind", BAD_OFFSETS)
@pytest.mark.parametrize("code", [IndexCode.RAW32, IndexCode.RAW64], ids=name)
def test_bad_indices_are_refused_however_well_packed(code: IndexCode, kind: str) -> None:
    """The checksum is right: only the indices themselves are wrong."""
    message, tag = crafted(BAD_OFFSETS[kind], code=code)
    assert_refused(message, tag, "out of order or out of range")


@pytest.mark.parametrize("offsets", [[-1], [-1, 5], [0, 2**63 - 1, -(2**63)], [2**62, -(2**62), 5]])
def test_negative_offsets_are_refused(offsets: list[int]) -> None:
    message, tag = crafted(offsets, 2**40, IndexCode.RAW64)
    assert_refused(message, tag, "out of order or out of range")


@pytest.mark.parametrize("code", [IndexCode.RAW32, IndexCode.RAW64], ids=name)
def test_good_indices_in_a_crafted_message_are_taken(code: IndexCode) -> None:
    """The refusals above are due to the indices and not to the craft."""
    message, tag = crafted([0, 5, 999], code=code)
    assert wire.decode(message, tag).vector.indices.tolist() == [0, 5, 999]


NONSENSE = {
    "another version": (MAGIC, "4s", b"okt2"),
    "another protocol": (MAGIC, "4s", b"HTTP"),
    "index code 6": (INDEX_CODE, "B", 6),
    "index code 255": (INDEX_CODE, "B", 255),
    "value code 4": (VALUE_CODE, "B", 4),
    "value code 255": (VALUE_CODE, "B", 255),
    "scale NaN": (SCALE, "<f", math.nan),
    "scale inf": (SCALE, "<f", math.inf),
    "scale -inf": (SCALE, "<f", -math.inf),
    "a scale that makes infinities": (SCALE, "<f", 1.5 * 2.0**127),
    "one entry less": (COUNT, "<Q", 4),
    "one entry more": (COUNT, "<Q", 6),
    "more entries than the region": (COUNT, "<Q", 1001),
    "2^61 entries": (COUNT, "<Q", 2**61),
    "2^64 - 1 entries": (COUNT, "<Q", 2**64 - 1),
    "no index bytes": (INDEX_BYTES, "<Q", 0),
    "an index byte less": (INDEX_BYTES, "<Q", 9),
    "2^64 - 1 index bytes": (INDEX_BYTES, "<Q", 2**64 - 1),
    "a whole region that is not": (INDEX_CODE, "B", IndexCode.FULL),
    "raw indices that are not": (INDEX_CODE, "B", IndexCode.RAW32),
    "long indices that are not": (INDEX_CODE, "B", IndexCode.RAW64),
    "Elias-Fano that is not": (INDEX_CODE, "B", IndexCode.ELIAS_FANO),
    "length zero": (LENGTH, "<Q", 0),
    "length 2^63": (LENGTH, "<Q", 2**63),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_with_a_right_checksum_is_refused(kind: str) -> None:
    message, tag = small_message()
    assert field(message, INDEX_CODE, "B") == IndexCode.DELTA16
    assert_refused(patched(message, NONSENSE[kind]), tag)


@every_backend
def test_a_misaligned_message_is_read_all_the_same(codes: ModuleType) -> None:
    message, tag = small_message()
    expected = wire.decode(message, tag).vector
    with mock.patch.object(wire, "codes", codes):
        for shift in range(8):
            memory = torch.zeros(message.numel() + 8, dtype=torch.uint8)
            place = memory[shift : shift + message.numel()]
            place.copy_(message)
            found = wire.decode(place, tag).vector
            assert torch.equal(found.indices, expected.indices)
            assert torch.equal(found.values, expected.values)


def test_an_error_says_from_whom_and_what() -> None:
    message, tag = small_message()
    with pytest.raises(WireError, match=r"rank 2 \(step 7, bucket 3, phase 1\): .*checksum"):
        wire.decode(torch.cat([message[:-1], message[-1:] ^ 1]), tag)


# --- fuzz ----------------------------------------------------------------------------------------------------

INTERESTING = [INDEX_CODE, VALUE_CODE, FLAGS, COUNT, COUNT + 1, INDEX_BYTES, SCALE, SCALE + 3, LOW]


def assert_refused_or_valid(message: Tensor, tag: Tag) -> None:
    """Whoever wrote it: an error, or increasing indices of the region. With Numba and without, the same."""
    outcomes = []
    for codes in BACKENDS:
        try:
            with mock.patch.object(wire, "codes", codes):
                found = wire.decode(message, tag).vector
        except WireError:
            outcomes.append(None)
            continue
        indices = found.indices.tolist()
        assert indices == sorted(set(indices))
        assert all(tag.start <= i < tag.start + tag.span for i in indices)
        assert found.values.numel() == len(indices)
        assert field(message, VALUE_CODE, "B") != ValueCode.E4M3 or found.values.isfinite().all()
        outcomes.append((indices, found.values.view(torch.int32).tolist()))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=150)
@given(part_and_tag=parts(), code=st.sampled_from(list(ValueCode)), raw=st.booleans(), data=st.data())
def test_random_mutations(
    part_and_tag: tuple[SparseVector, Tag], code: ValueCode, raw: bool, data: st.DataObject
) -> None:
    """Bytes changed anywhere, mostly where they matter, under a checksum that is right."""
    part, tag = part_and_tag
    message = wire.encode(part, tag, code, raw_indices=raw)[0]
    places = st.one_of(st.sampled_from(INTERESTING), st.integers(16, message.numel() - 1))
    changes = data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4))
    assert_refused_or_valid(patched(message, *((place, "B", value) for place, value in changes)), tag)


@settings(max_examples=150)
@given(
    body=st.binary(max_size=120),
    index_code=st.sampled_from(list(IndexCode)),
    value_code=st.sampled_from(list(ValueCode)),
    low=st.integers(0, 33),
    span=st.sampled_from([1, 64, 1000, 2**31 - 1, 2**31, 2**40]),
    data=st.data(),
)
@example(bytes(8) + b"\x04" + bytes(15), IndexCode.ELIAS_FANO, ValueCode.FP32, 31, 2**31 - 1, None)
def test_random_bodies(
    body: bytes, index_code: IndexCode, value_code: ValueCode, low: int, span: int, data: Any
) -> None:
    """A header that fits the length, and behind it anything at all."""
    room = len(body) // 8 * 8
    count = 1 if data is None else data.draw(st.integers(0, min(span, room // value_code.width)))
    index_bytes = room - (count * value_code.width + 7) // 8 * 8
    tag = tag_for(span)
    header = wire.encode(SparseVector.empty(span), tag, value_code)[0].numpy()[:HEADER_BYTES].tobytes()
    message = torch.frombuffer(bytearray(header + body[:room]), dtype=torch.uint8)
    fields = [(LENGTH, "<Q", message.numel()), (INDEX_CODE, "B", index_code), (COUNT, "<Q", count)]
    message = patched(message, *fields, (INDEX_BYTES, "<Q", index_bytes), (LOW, "B", low))
    assert_refused_or_valid(message, tag)
