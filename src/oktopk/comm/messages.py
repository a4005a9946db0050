"""Messages between two ranks: how they are framed, and the interface of what moves them.

A *message* is a 1-D uint8 CPU tensor whose first eight bytes hold its own length, little-endian. A transport that
cannot tell how much has arrived reads it there, so a receive needs no exchange of sizes: it is posted with a
capacity, an upper bound that every rank knows.

A *sealed* message carries control traffic, with what a receiver needs to check it.

    offset  size  field
         0     8  length of the whole message in bytes, a multiple of 8
         8     8  checksum of everything else
        16     4  CRC-32 of the phase's name          20  4  sender
        24     4  number of the message               28  4  bytes of padding at the end
        32        payload, padded to 8 bytes

The number counts such messages, or operations of all ranks; the receiver counts too. A message that is damaged,
repeated, or of another operation is a WireError: nothing else would notice a wrong count or threshold.
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import WireError
from ..kernels import codes
from ..kernels.types import padded
from ..metrics.traffic import Operation

LENGTH = struct.Struct("<Q")
"""The length field at the start of a message."""
MIN_RECEIVE = 1 << 20
"""Bytes that every receive has room for, whatever its capacity. If a message was lost, the next one arrives at its
receive, and its length gives it away. gloo ends the process if a message is larger than the receive."""
_FRAME = struct.Struct("<QQ")
_HEADER = struct.Struct("<IIII")
_BYTES = _FRAME.size + _HEADER.size


class TransferError(RuntimeError):
    """A connection failed or timed out. Torch raises RuntimeError for its own connections too."""


class Closed(TransferError):
    """The connections were closed on this rank."""


class LostRank(TransferError):
    """A connection failed while nothing was under way on it."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Transfer(ABC):
    """A message that is being sent or received."""

    @abstractmethod
    def wait(self, timeout: timedelta) -> None:
        """Block until it is done. Raises a RuntimeError when the connection fails or the timeout has passed."""

    @abstractmethod
    def message(self, peer: int, operation: Operation) -> Tensor:
        """The message, once it is done. Raises a WireError if its length cannot be right."""


class Messages(ABC):
    """Moves messages between this rank and the others, in the order in which they were begun for each pair."""

    @abstractmethod
    def send(self, message: Tensor, peer: int) -> Transfer: ...

    @abstractmethod
    def receive(self, capacity: int, peer: int) -> Transfer: ...

    def check_ranks(self) -> None:  # noqa: B027 - gloo does not tell
        """Raise a LostRank if the connection to some rank has ended. May be called by another thread."""

    @abstractmethod
    def close(self) -> None:
        """End all connections and all that is under way. May be called twice, and by another thread."""


def parse_json(text: bytes, sender: int, phase: str) -> Any:
    """What another rank sent as JSON.

    Args:
        text: As it was sent.
        sender: The rank that sent it.
        phase: What it belongs to.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{phase}: rank {sender} sent invalid JSON: {error}") from error


def pack(*payloads: Tensor) -> Tensor:
    """Any 1-D tensors, end to end, as one message."""
    bodies = [payload.contiguous().view(torch.uint8).numpy() for payload in payloads]
    message = np.empty(LENGTH.size + sum(body.size for body in bodies), np.uint8)
    LENGTH.pack_into(message.data, 0, message.size)
    np.concatenate(bodies, out=message[LENGTH.size :])
    return torch.from_numpy(message)


def unpack(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The payload of a packed message."""
    body = message[LENGTH.size :]
    if body.numel() % dtype.itemsize:
        raise WireError(f"a packed message of {body.numel()} bytes does not hold {dtype}")
    return body.clone().view(dtype)


def packed_bytes(payload_bytes: int) -> int:
    """The size of a message with a payload of so many bytes."""
    return LENGTH.size + payload_bytes


def check_length(length: int, capacity: int, peer: int, operation: Operation) -> None:
    """Raise a WireError if a message cannot have this length."""
    if not LENGTH.size <= length <= capacity:
        raise WireError(
            f"{operation}: the message from rank {peer} has a length field of {length}, not {LENGTH.size} to "
            f"{capacity} bytes"
        )


def trim(buffer: Tensor, peer: int, operation: Operation) -> Tensor:
    """The message at the start of a receive buffer."""
    length = LENGTH.unpack_from(buffer.numpy().data)[0] if buffer.numel() >= LENGTH.size else 0
    check_length(length, buffer.numel(), peer, operation)
    return buffer[:length]


def join_messages(messages: Sequence[Tensor]) -> Tensor:
    """Several messages as one; a single one stays as it is."""
    return messages[0] if len(messages) == 1 else pack(*messages)


def split_messages(message: Tensor, count: int, peer: int, operation: Operation) -> list[Tensor]:
    """What join_messages made one of."""
    if count == 1:
        return [message]
    rest = message[LENGTH.size :]
    parts = []
    for _ in range(count):
        parts.append(trim(rest, peer, operation))
        rest = rest[parts[-1].numel() :]
    if rest.numel():
        raise WireError(f"{operation}: {rest.numel()} bytes too many from rank {peer}")
    return parts


def gather_relays(sender: int, receiver: int, world: int) -> list[int]:
    """The ranks that pass a message of an all-gather on, from the last one to the first.

    >>> gather_relays(7, 0, 8)  # 7 -> 6 -> 4 -> 0
    [4, 6]
    """
    relays, left = [receiver], (sender - receiver) % world
    while left:
        hop = 1 << (left.bit_length() - 1)
        relays.append((relays[-1] + hop) % world)
        left -= hop
    return relays[1:-1]


def broadcast_relays(receiver: int) -> list[int]:
    """The ranks that pass a broadcast of rank 0 on to a rank, from the last one to the first.

    >>> broadcast_relays(7)  # 0 -> 1 -> 3 -> 7
    [3, 1]
    """
    relays = [receiver]
    while relays[-1]:
        relays.append(relays[-1] - (1 << (relays[-1].bit_length() - 1)))
    return relays[1:-1]


def sealed_bytes(payload_bytes: int) -> int:
    return _BYTES + padded(payload_bytes)


def seal(payload: Tensor, sender: int, number: int, operation: Operation) -> Tensor:
    """A 1-D tensor of any type as a sealed message."""
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
    """The payload of the message that is expected from `sender`."""
    data = message.numpy().copy()  # the payload is the caller's own; and aligned
    if data.size < _BYTES or data.size % 8:
        raise WireError(f"{operation}: the message from rank {sender} has an invalid size: {data.size} bytes")
    length, checksum = _FRAME.unpack_from(data.data)
    if length != data.size or checksum != _checksum(data):
        raise WireError(f"{operation}: the message from rank {sender} is damaged: wrong checksum")
    *tag, padding = _HEADER.unpack_from(data.data, _FRAME.size)
    if tag != [_phase(operation.phase), sender, number % 2**32]:
        raise WireError(
            f"{operation}: the message from rank {sender} belongs to another operation (number {tag[2]} of rank "
            f"{tag[1]}, expected {number}): one was lost or repeated, or the ranks called different operations"
        )
    size = data.size - _BYTES - padding
    if size < 0 or size % dtype.itemsize:
        raise WireError(f"{operation}: the message from rank {sender} has {size} bytes, which do not hold {dtype}")
    return torch.from_numpy(data)[_BYTES : _BYTES + size].view(dtype)


@functools.cache
def _phase(name: str) -> int:
    return zlib.crc32(name.encode())


def _checksum(message: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return int(codes.checksum(message[_FRAME.size :].view(np.uint64), message.size))
