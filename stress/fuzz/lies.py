"""Lies: messages that a hostile rank sends in place of its own, with right lengths and checksums."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from oktopk.comm.messages import LENGTH, pack
from oktopk.kernels import codes, index_dtype
from oktopk.kernels.coding import LANES
from oktopk.kernels.types import padded
from oktopk.wire.message import HEADER_BYTES, MAGIC, Tag, ValueCode, decode, encode
from oktopk.wire.sparse_vector import SparseVector

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
HEADER, MANY, FEW, PLACES, VALUES, TWIN, NAN, FLAG = (
    "another step or region", "too many entries", "few entries", "other places", "other values",
    "other values of the same checksum", "NaN", "NaN flag",
)  # fmt: skip
CONTROL = "control"
KINDS = (HEADER, MANY, FEW, PLACES, PLACES, VALUES, VALUES, TWIN, NAN, FLAG)
_FIELDS = {"step": (24, "<Q"), "bucket": (32, "<I"), "sender": (36, "<I"), "size": (40, "<Q"), "start": (48, "<Q"),
           "span": (56, "<Q"), "phase": (20, "<B")}  # fmt: skip
_VALUE_CODE = 22
_ENTRIES, _INDEX_BYTES = (64, "<Q"), (72, "<Q")
_SUMMED = 16
_SEALED = 32
_SEALED_SENDER = 20
_INTEGERS = (-1, 0, 1, 2, 7, 2**31 - 1, -(2**31), 2**62, -(2**63))
_TEXTS = ("", "[]", "null", "7", '{"problem": 5, "terms": {}}', '{"problem": null, "terms": []}', "[" * 9000,
          '["a"]', '{"problem": "disk full", "terms": {}}')  # fmt: skip


@dataclass(frozen=True)
class Lie:
    """What to say instead of the truth; the seed makes it the same however often it is told."""

    kind: str
    seed: int
    own_only: bool
    """Whether messages of other ranks are passed on as they are."""


def lie_about(message: Tensor, lie: Lie, rank: int) -> Tensor:
    """The message that is sent instead: one, or several of which some are changed."""
    if is_sparse(message):
        if lie.own_only and _tag(message).sender != rank:
            return message
        return _lie_about_vector(message, lie.kind, Random(lie.seed))
    if is_sealed(message):
        sender = struct.unpack_from("<I", message.numpy().data, _SEALED_SENDER)[0]
        return message if lie.own_only and sender != rank else _lie_about_control(message, Random(lie.seed))
    parts = _split(message)
    changed = [lie_about(part, lie, rank) for part in parts]
    if not lie.own_only:  # one of those that it passes on, or its own
        chosen = Random(lie.seed).randrange(len(parts))
        changed = [
            new if place == chosen else part for place, (part, new) in enumerate(zip(parts, changed, strict=True))
        ]
    return pack(*changed)


def is_sparse(message: Tensor) -> bool:
    return message.numel() >= HEADER_BYTES and bytes(message[16:20].numpy()) == MAGIC


def is_sealed(message: Tensor) -> bool:
    data = message.numpy()
    if data.size < _SEALED or data.size % 8:
        return False
    length, checksum = struct.unpack_from("<QQ", data.data)
    return bool(length == data.size and checksum == _checksum(data.copy()))


def _split(message: Tensor) -> list[Tensor]:
    rest, parts = message[LENGTH.size :], []
    while rest.numel():
        (length,) = LENGTH.unpack_from(rest.numpy().data)
        parts.append(rest[:length].clone())
        rest = rest[length:]
    return parts


def _tag(message: Tensor) -> Tag:
    data = message.numpy().data
    return Tag(**{name: struct.unpack_from(form, data, at)[0] for name, (at, form) in _FIELDS.items()})


def _lie_about_vector(message: Tensor, kind: str, chance: Random) -> Tensor:
    tag = _tag(message)
    if kind == HEADER:
        name = chance.choice([*_FIELDS])
        at, form = _FIELDS[name]
        false = getattr(tag, name) + chance.choice((1, 1, 2, 5))
        data = message.numpy().copy()
        struct.pack_into(form, data.data, at, false % 256 if form == "<B" else false)
        return _seal(data)
    if kind == TWIN:
        return _twin(message, chance)
    known, code = decode(message.clone(), tag), ValueCode(int(message[_VALUE_CODE]))
    vector = _false_vector(known.vector, tag, kind, chance)
    return encode(vector, tag, code, nonfinite=kind == FLAG or known.nonfinite)[0]


def _twin(message: Tensor, chance: Random) -> Tensor:
    """Three other signs and the same checksum: two words of one lane, the second of which undoes the first.

    A short message has no two such words, and stays as it is.
    """
    data = message.numpy().copy()
    entries, index_bytes = (struct.unpack_from(form, data.data, at)[0] for at, form in (_ENTRIES, _INDEX_BYTES))
    width = ValueCode(int(message[_VALUE_CODE])).width
    words = data[_SUMMED:].view(np.uint64)
    start = (HEADER_BYTES - _SUMMED + padded(index_bytes)) // 8
    stop = min(start + entries * width // 8, words.size // LANES * LANES) - LANES
    if start < stop:
        first = chance.randrange(start, stop)
        words[first] ^= np.uint64(1 << 63)
        words[first + LANES] ^= np.uint64(1 << 63 | 1 << 31)
        assert _checksum(data) == struct.unpack_from("<Q", data.data, 8)[0]
    return torch.from_numpy(data)


def _false_vector(vector: SparseVector, tag: Tag, kind: str, chance: Random) -> SparseVector:
    count = len(vector)
    if kind == FLAG:
        return vector
    if kind == FEW:
        return vector[: chance.randrange(count)] if count else vector
    if kind == NAN:
        values = vector.values.clone()
        values[chance.randrange(count) if count else slice(0)] = float("nan")
        return vector.with_values(values)
    if kind in (PLACES, MANY):
        wanted = count if kind == PLACES else tag.span
        places = sorted(chance.sample(range(tag.start, tag.start + tag.span), wanted))
        indices = torch.tensor(places, dtype=index_dtype(tag.size))
        return SparseVector(indices, _numbers(wanted, chance), tag.size)
    return vector.with_values(_numbers(count, chance))


def _numbers(count: int, chance: Random) -> Tensor:
    return torch.tensor([chance.choice((1.0, 30.0)) * chance.gauss(0, 1) for _ in range(count)])


def _lie_about_control(message: Tensor, chance: Random) -> Tensor:
    """Another payload: some number changed, some more or fewer of them, or another text."""
    data = message.numpy().copy()
    (padding,) = struct.unpack_from("<I", data.data, 28)
    payload = data[_SEALED : data.size - padding].copy()
    if (terms := _other_terms(payload)) is not None:
        payload = np.frombuffer(chance.choice((*_TEXTS, terms)).encode(), np.uint8)
    elif chance.random() < 0.2:
        payload = payload[: chance.randrange(payload.size + 1)] if chance.random() < 0.5 else np.tile(payload, 2)
    elif payload.size:
        for _ in range(chance.choice((1, 1, 3))):
            width = chance.choice((4, 8))
            at = chance.randrange(max(1, payload.size // width)) * width
            false = chance.choice(_INTEGERS) + chance.choice((0, 0, 1))
            payload[at : at + width] = np.frombuffer(
                struct.pack("<q", max(-(2**63), false))[:width], np.uint8
            )[: payload.size - at]  # fmt: skip
    body = np.zeros((payload.size + 7) // 8 * 8, np.uint8)
    body[: payload.size] = payload
    struct.pack_into("<I", data.data, 28, body.size - payload.size)
    return _seal(np.concatenate([data[:_SEALED], body]))


def in_the_name_of(rank: int, message: Tensor) -> Tensor:
    """A control message of another rank, sent as one of this rank."""
    data = message.numpy().copy()
    struct.pack_into("<I", data.data, _SEALED_SENDER, rank)
    return _seal(data)


def _other_terms(payload: Bytes) -> str | None:
    """The same terms, one of them with another value; None if these are no terms."""
    try:
        said = json.loads(bytes(payload))
        said["terms"]["density"] = "0.5"
    except (ValueError, TypeError, KeyError):
        return None
    return json.dumps(said)


def _seal(data: Bytes) -> Tensor:
    struct.pack_into("<Q", data.data, 0, data.size)
    struct.pack_into("<Q", data.data, 8, _checksum(data))
    return torch.from_numpy(data)


def _checksum(data: Bytes) -> int:
    return int(codes.checksum(data[_SUMMED:].view(np.uint64), data.size))
