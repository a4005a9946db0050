"""Sealed messages: what ranks tell each other besides sparse gradients, with what a receiver needs to check it.

    offset  size  field
         0     8  length of the whole message in bytes, a multiple of 8
         8     8  checksum of everything else
        16     4  CRC-32 of the phase's name          20  4  sender
        24     4  number of the message               28  4  bytes of padding at the end
        32        payload, padded to 8 bytes

The number says how many such messages, or operations of all ranks, there were before: who receives counts too. A
message that is damaged, repeated, or of another operation is a WireError: as a count or a threshold it would be
believed.
"""

from __future__ import annotations

import functools
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from ..kernels import codes
from ..kernels.coding import padded
from ..metrics.traffic import Operation

_FRAME = struct.Struct("<QQ")
_HEADER = struct.Struct("<IIII")
_BYTES = _FRAME.size + _HEADER.size


def sealed_bytes(payload_bytes: int) -> int:
    return _BYTES + padded(payload_bytes)


def seal(payload: Tensor, sender: int, number: int, operation: Operation) -> Tensor:
    """A 1-D tensor of any type as a message."""
    body = payload.contiguous().view(torch.uint8).numpy()
    end = _BYTES + body.size
    message = np.empty(sealed_bytes(body.size), np.uint8)
    message[_BYTES:end] = body
    message[end:] = 0
    tag = _phase(operation.phase), sender, number % 2**32
    _HEADER.pack_into(message.data, _FRAME.size, *tag, message.size - end)
    _FRAME.pack_into(message.data, 0, message.size, _checksum(message))
    return torch.from_numpy(message)


def unseal(message: Tensor, sender: int, number: int, operation: Operation, dtype: torch.dtype) -> Tensor:
    """The payload of the message that was to come from `sender`."""
    data = message.numpy().copy()  # the payload is the caller's own; and aligned
    if data.size < _BYTES or data.size % 8:
        raise WireError(f"{operation}: the message from rank {sender} has {data.size} bytes, which do not fit")
    length, checksum = _FRAME.unpack_from(data.data)
    if length != data.size or checksum != _checksum(data):
        raise WireError(f"{operation}: the message from rank {sender} is damaged: its checksum is wrong")
    *tag, padding = _HEADER.unpack_from(data.data, _FRAME.size)
    if tag != [_phase(operation.phase), sender, number % 2**32]:
        raise WireError(
            f"{operation}: the message from rank {sender} is another one (number {tag[2]} of rank {tag[1]}, "
            f"not {number}): one was lost or repeated, or the ranks do not do the same"
        )
    size = data.size - _BYTES - padding
    if size < 0 or size % dtype.itemsize:
        raise WireError(f"{operation}: the message from rank {sender} has {size} bytes, which are not {dtype}")
    return torch.from_numpy(data)[_BYTES : _BYTES + size].view(dtype)


@functools.cache
def _phase(name: str) -> int:
    return zlib.crc32(name.encode())


def _checksum(message: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return int(codes.checksum(message[_FRAME.size :].view(np.uint64), message.size))
