"""Value codecs by name: those of `kernels.values`, and plug-ins.

A plug-in's codec is NumPy code, called for every message. What it returns is checked before anything else sees
it: the length of its bytes, and the length, type and finiteness of the values that it decodes, since the bytes may
come from anywhere.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..kernels.values import Array, ValueCode
from ..utils.registry import Registry

NUMBERS = range(128, 256)
"""Codes in the header that plug-ins may have; those below are oktopk's own."""
_WIDTHS = range(1, 9)
_PROBE = 256
"""Values that stand for all of a codec, when ranks compare theirs."""


@dataclass(frozen=True)
class ValueCodec(ABC):
    """How the values of a message are written: the base class of value codecs outside of oktopk.

    A subclass is a frozen dataclass whose fields are its parameters, the same on all ranks. Values are written in
    `width` bytes each, and a message also has one number of type float32, the scale. The sender keeps the
    difference between a value and what decode() makes of it in its residual, so that a lossy codec loses nothing;
    but what it decodes must resemble the value, or the residual grows for ever.

    Attributes:
        name: The name that `values=` takes.
        number: The code in the header of messages, from 128 to 255.
        width: Bytes per value, from 1 to 8.

    Example:
        The sign of every value, and their mean magnitude as the scale:

        >>> import numpy as np
        >>> import oktopk
        >>> import torch
        >>> class Sign(oktopk.ValueCodec):
        ...     name, number, width = "sign", 200, 1
        ...     def encode(self, values):
        ...         return (values < 0).astype(np.uint8), float(np.abs(values).mean()) if values.size else 0.0
        ...     def decode(self, stream, scale):
        ...         return np.where(stream, -scale, scale).astype(np.float32)
        >>> def mean(comm):
        ...     x = torch.tensor([3.0, -1.0])
        ...     return oktopk.sparse_allreduce(x, 1.0, "topka", comm=comm, values=Sign())[0].tolist()
        >>> oktopk.run_threads(2, mean)[0]
        [2.0, -2.0]
    """

    name: ClassVar[str]
    number: ClassVar[int]
    width: ClassVar[int]

    @abstractmethod
    def encode(self, values: Array) -> tuple[Array, float]:
        """Encode values of type float32, all finite, none or any number of them.

        Returns their bytes (uint8, `width` for each value), and the scale, which is rounded to float32.
        """

    @abstractmethod
    def decode(self, stream: Array, scale: float) -> Array:
        """Decode bytes to values of type float32, from the bytes and the scale alone: the same bits on every rank.

        The decoded value of a finite one is finite, also of the largest. Any bytes may arrive; other ranks are not
        trusted. An exception, another length, or a non-finite value is a WireError of the message.
        """

    def __str__(self) -> str:
        """What ranks compare: also what it makes of some bytes, so that two versions of it are told apart."""
        return f"{self!r} (code {self.number}, {self.width} bytes per value, digest {_digest(self):08x})"


Values = ValueCode | ValueCodec
"""What writes the values of messages."""


class CodecError(ValueError):
    """A value codec does not do what it must."""


def _accept(name: str, thing: Any) -> Values:
    codec = thing() if isinstance(thing, type) and issubclass(thing, ValueCodec) else thing
    if not isinstance(codec, ValueCodec):
        raise TypeError(f"expected an oktopk.ValueCodec, got {thing!r}")
    if codec.name != name:
        raise ValueError(f"{type(codec).__name__}.name must be {name!r}, which is how it is asked for")
    return _check_codec(codec)


def _check_codec(codec: ValueCodec) -> ValueCodec:
    for what, allowed in (("number", NUMBERS), ("width", _WIDTHS)):
        found = getattr(codec, what, None)
        if type(found) is not int or found not in allowed:
            bounds = f"{allowed.start} to {allowed.stop - 1}"
            raise ValueError(f"{type(codec).__name__}.{what} must be an integer from {bounds}, got {found!r}")
    return codec


VALUE_CODES: Registry[Values] = Registry(
    "value format", "oktopk.values", _accept, {code.name.lower(): code for code in ValueCode}
)
"""Every value codec by name."""


def find_values(values: object) -> Values:
    """Return the codec of that name, or the given one of a plug-in.

    >>> find_values("fp16").width
    2
    """
    return _check_codec(values) if isinstance(values, ValueCodec) else VALUE_CODES.find(values)


def describe_values(values: str | ValueCodec) -> str:
    """What ranks must have in common to understand each other's values.

    >>> describe_values("fp16")
    'fp16'
    """
    codec = find_values(values)
    return str(codec) if isinstance(codec, ValueCodec) else str(values)


def write_values(codec: ValueCodec, values: Array, out: Array, decoded: Array) -> float:
    """Encode values into out; `decoded` gets what receivers will decode. Returns the scale.

    What is not finite is written as 0: such a message is flagged, and its step skipped.
    """
    finite = np.where(np.isfinite(values), values, np.float32(0))
    try:
        stream, given = codec.encode(finite.copy())
        found, scale = np.asarray(stream), float(np.float32(given))
    except Exception as error:
        raise CodecError(f"{_name(codec)} cannot encode {values.size} values: {error!r}") from error
    if found.dtype != np.uint8 or found.shape != out.shape:
        shown = f"{found.dtype} of shape {found.shape}"
        raise CodecError(f"{_name(codec)} encodes {values.size} values as {shown}, expected {out.size} uint8")
    if not math.isfinite(scale):
        raise CodecError(f"{_name(codec)} has the scale {scale}, expected a finite number")
    out[:] = found
    decoded[:] = read_values(codec, out, scale, values.size)
    return scale


def read_values(codec: ValueCodec, stream: Array, scale: float, count: int) -> Array:
    """Decode and check; raises CodecError."""
    try:
        found = np.asarray(codec.decode(stream.copy(), scale))
    except Exception as error:
        raise CodecError(f"{_name(codec)} cannot decode {count} values: {error!r}") from error
    if found.dtype != np.float32 or found.shape != (count,):
        shown = f"{found.dtype} of shape {found.shape}"
        raise CodecError(f"{_name(codec)} decodes {count} values as {shown}, expected {count} float32")
    if not np.isfinite(found).all():
        raise CodecError(f"{_name(codec)} decodes a value that is not finite")
    return found.copy()


def _digest(codec: ValueCodec) -> int:
    """A checksum of what a codec makes of some bytes."""
    stream = np.random.default_rng(0).integers(0, 256, _PROBE * codec.width, np.uint8)
    try:
        return zlib.crc32(np.ascontiguousarray(codec.decode(stream, 0.5)).tobytes())
    except Exception as error:  # bytes that it refuses
        return zlib.crc32(type(error).__name__.encode())


def _name(codec: ValueCodec) -> str:
    return f"value codec {getattr(codec, 'name', type(codec).__name__)!r}"
