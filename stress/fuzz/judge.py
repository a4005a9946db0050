"""The law: a message is a valid sparse vector of its region or a WireError, by both back-ends alike.

Its bytes as a sealed message are the payload that was sealed, or a WireError.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import numpy as np
import torch

from oktopk.comm import messages as seal
from oktopk.comm.messages import split_messages as take_apart
from oktopk.errors import WireError
from oktopk.kernels import coding
from oktopk.kernels.cpu import coding as coding_cpu
from oktopk.metrics.traffic import Operation
from oktopk.tools.simulate.trace.format import parts_of
from oktopk.wire import message as wire
from oktopk.wire.message import Decoded, ValueCode
from stress.fuzz.cases import LONGEST, Case
from stress.fuzz.corpus import corpus
from stress.fuzz.memory import Guarded, GuardedNumpy

BACKENDS: tuple[ModuleType, ...] = (coding, coding_cpu)
DECODED = "decoded"
REASONS = {
    "expected a header": "frame", "length field": "frame", "magic is": "frame", "checksum mismatch": "checksum",
    "unexpected message": "tag", "unknown codes": "header", "do not fit": "header", "indices out of": "indices",
}  # fmt: skip
"""What an error says, and the check that it comes from."""
OUTCOMES = (DECODED, *dict.fromkeys(REASONS.values()))
_VALUE_CODE = 22
_OPERATION = Operation("all_gather", "gather")
EXPECTED = (3, 7, Operation("all_gather", "counts", control=True))
"""Sender, number and operation of the sealed message that is to come."""
_SEALED_TYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
_SEALED_HEAD = 32


class LawBroken(AssertionError):
    """Neither a valid vector nor a clear error."""


class Judge:
    """Decodes cases in guarded memory. Made by `judging`, which lends the memory to `wire`."""

    def __init__(self, memory: GuardedNumpy) -> None:
        self._memory, self._messages = memory, Guarded(LONGEST)

    def outcome(self, case: Case) -> str:
        """What became of it; a LawBroken, or whatever the decoder lets through, if that breaks the law."""
        self._memory.at_end = case.number % 2 == 0
        self._memory.limit = 8 * len(case.message)
        message = self._messages.array(len(case.message), np.uint8, self._memory.at_end)
        message[:] = np.frombuffer(sealed(case), np.uint8)
        self._unseal(torch.from_numpy(message), case.number)
        message[:] = np.frombuffer(case.message, np.uint8)
        self._unseal(torch.from_numpy(message), case.number)
        _take_apart(torch.from_numpy(message))
        answers = [self._answer(torch.from_numpy(message), case, codes) for codes in BACKENDS]
        if answers[0] != answers[1]:
            raise LawBroken(f"back-ends disagree: {answers[0][0]}, {answers[1][0]}")
        if message.tobytes() != case.message:
            raise LawBroken("the message was written to")
        return answers[0][0]

    def _answer(self, message: torch.Tensor, case: Case, codes: ModuleType) -> tuple[str, bytes, bytes]:
        wire.codes = codes  # type: ignore[misc]
        try:
            decoded = wire.decode(message, case.tag)
        except WireError as error:
            found = _reason(str(error)), b"", b""
        else:
            found = DECODED, *_checked(decoded, case)
        if not (self._memory.intact() and self._messages.intact()):
            raise LawBroken("bytes beside an array have changed")
        return found

    def _unseal(self, message: torch.Tensor, number: int) -> None:
        before, dtype = message.numpy().tobytes(), _SEALED_TYPES[number // 10 % len(_SEALED_TYPES)]
        for codes in BACKENDS:
            seal.codes = codes  # type: ignore[misc]
            try:
                payload = seal.unseal(message, *EXPECTED, dtype)
            except WireError as error:
                if f"the message from rank {EXPECTED[0]}" not in str(error):
                    raise LawBroken(f"a sealed message, refused without saying from whom: {error}") from error
            else:
                _check_payload(payload, before, dtype)
        if message.numpy().tobytes() != before or not self._messages.intact():
            raise LawBroken("a sealed message was written to")


@contextmanager
def judging() -> Iterator[Judge]:
    corpus()  # the library writes it, in memory of its own
    memory = GuardedNumpy(8 * LONGEST)
    with (
        mock.patch.object(wire, "np", memory),
        mock.patch.object(wire, "codes", coding_cpu),
        mock.patch.object(seal, "codes", coding_cpu),
    ):
        yield Judge(memory)


def sealed(case: Case) -> bytes:
    """As if the expected sender had sealed these bytes; the number of the case says how many are padding."""
    data, (sender, number, operation) = bytearray(case.message), EXPECTED
    if len(data) >= _SEALED_HEAD and len(data) % 8 == 0:
        body = len(data) - _SEALED_HEAD
        padding = (0, 1, 4, 7, 8, 31, body, body + 1, 2**31, 2**32 - 1)[case.number % 10]
        struct.pack_into("<IIII", data, 16, zlib.crc32(operation.phase.encode()), sender, number, padding)
        struct.pack_into("<QQ", data, 0, len(data), wire._checksum(np.frombuffer(data, np.uint8)))
    return bytes(data)


def _check_payload(payload: torch.Tensor, message: bytes, dtype: torch.dtype) -> None:
    if len(message) < _SEALED_HEAD:
        raise LawBroken(f"a sealed message of {len(message)} bytes was believed")
    (padding,) = struct.unpack_from("<I", message, _SEALED_HEAD - 4)
    size = len(message) - _SEALED_HEAD - padding
    body = message[_SEALED_HEAD : _SEALED_HEAD + max(0, size)]
    if size < 0 or payload.dtype != dtype or payload.numpy().tobytes() != body:
        raise LawBroken(f"a sealed message of {size} bytes became {payload.numel()} numbers of {payload.dtype}")


def _take_apart(message: torch.Tensor) -> None:
    """As two messages laid end to end: all of it or an error. A recorder reads it, too, to an end."""
    parts_of(message)
    try:
        parts = take_apart(message, 2, 0, _OPERATION)
    except WireError:
        return
    if sum(part.numel() for part in parts) != message.numel() - 8:
        raise LawBroken("messages laid end to end were not taken apart")


def _reason(error: str) -> str:
    if not error.startswith("message from rank "):
        raise LawBroken(f"an error that does not say from whom: {error}")
    for words, reason in REASONS.items():
        if words in error:
            return reason
    raise LawBroken(f"an error that says nothing known: {error}")


def _checked(decoded: Decoded, case: Case) -> tuple[bytes, bytes]:
    """Indices and values, if they are a vector of the region."""
    vector, tag = decoded.vector, case.tag
    indices, values = vector.indices.numpy(), vector.values.numpy()
    if vector.size != tag.size or indices.dtype != (np.int32 if tag.size < 2**31 else np.int64):
        raise LawBroken(f"a vector of {vector.size} with {indices.dtype}, not of {tag.size}")
    if indices.size != values.size or values.dtype != np.float32:
        raise LawBroken(f"{indices.size} indices, {values.size} values of {values.dtype}")
    if indices.size:
        if not (indices[1:] > indices[:-1]).all():
            raise LawBroken("indices do not increase")
        if not tag.start <= int(indices[0]) <= int(indices[-1]) < tag.start + tag.span:
            raise LawBroken("indices leave the region")
    if case.message[_VALUE_CODE] == ValueCode.E4M3 and not np.isfinite(values).all():
        raise LawBroken("8-bit values that are not finite")
    if not 0 <= decoded.blocked < 336:  # 2^24 ticks of 20 µs
        raise LawBroken(f"blocked for {decoded.blocked} seconds")
    return indices.tobytes(), values.tobytes()
