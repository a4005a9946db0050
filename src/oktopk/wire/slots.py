"""Messages of fixed size for sparse vectors, made and read on the device that holds them.

A row has room for a fixed number of entries, 4 bytes each with 16-bit values:

    bytes        content
    16           stamp, lowest magnitude selected, largest magnitude (both as bits of floats), scale
    4 · blocks   entries in each block of 65536 places
    2 · room     place inside its block, of each entry in order, less 32768
    w · room     values of w bytes; slots beyond the last entry hold zeros
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import WireError
from ..kernels.values import ValueCode

_BLOCK = 1 << 16
_HEADER = 4
"""Words of the header."""
_LONGEST_BLOCK = 1024
"""Entries that are dealt to a row at a time, at most."""
_FACTORS = 0x2545F4914F6CDD1D, 0x9E3779B97F4A7C15 - (1 << 64)
_SCALED = {ValueCode.FP16: 14, ValueCode.E4M3: 7}
"""To which power of two the largest magnitude of a row is brought."""
_DTYPES = {
    ValueCode.FP32: torch.float32,
    ValueCode.BF16: torch.bfloat16,
    ValueCode.FP16: torch.float16,
    ValueCode.E4M3: torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class RowLayout:
    """How a vector of `size` entries is dealt to `world` rows, in blocks.

    >>> RowLayout(7, 2).rows(torch.arange(1.0, 8.0)).tolist()
    [[1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0, 0.0]]
    """

    size: int
    world: int

    @property
    def block(self) -> int:
        """A power of two: some 64 blocks per row, if they are not too long."""
        return min(_LONGEST_BLOCK, 1 << max(0, (self.size // (64 * self.world)).bit_length() - 1))

    @property
    def span(self) -> int:
        """Entries of a row; zeros fill the last ones."""
        return -(-self.size // (self.world * self.block)) * self.block

    def rows(self, flat: Tensor) -> Tensor:
        """[size] -> [world, span]"""
        padded = pad(flat, (0, self.world * self.span - self.size))
        return padded.view(-1, self.world, self.block).transpose(0, 1).reshape(self.world, self.span)

    def flat(self, rows: Tensor) -> Tensor:
        """[world, span] -> [size]"""
        return rows.reshape(self.world, -1, self.block).transpose(0, 1).reshape(-1)[: self.size]


class Rows(NamedTuple):
    """What messages hold, for each of them."""

    stamp: Tensor
    lowest: Tensor
    largest: Tensor
    places: Tensor
    """[R, room], int64, increasing; `span` in empty slots."""
    values: Tensor


@dataclass(frozen=True)
class SlotFormat:
    """How entries of rows of `span` places are written, `room` of them in each message."""

    span: int
    room: int
    code: ValueCode = ValueCode.FP32

    @property
    def blocks(self) -> int:
        return -(-self.span // _BLOCK)

    @property
    def slot_bytes(self) -> int:
        return 2 + self.code.width

    @property
    def message_bytes(self) -> int:
        return 4 * _HEADER + 4 * self.blocks + self.slot_bytes * self.room

    def write(self, places: Tensor, values: Tensor, stamp: int, lowest: Tensor, largest: Tensor) -> Tensor:
        """Messages [R, message_bytes], uint8. `places` are int32 [R, room]; `lowest` and `largest` are 0-d."""
        count = places.shape[0]
        ends = torch.arange(1, self.blocks + 1, device=places.device, dtype=torch.int32) * _BLOCK
        ends = ends.clamp(max=self.span).expand(count, -1).contiguous()
        before = torch.searchsorted(places, ends)
        counts = before.diff(dim=1, prepend=before.new_zeros(count, 1)).int()
        scale = self._scale(values)
        header = torch.stack(
            [torch.full_like(scale, stamp), lowest.int().expand(count), largest.int().expand(count), scale], dim=1
        )
        # The place of an empty slot is the span, whatever that leaves in 16 bits: nobody reads it.
        inside = ((places & (_BLOCK - 1)) - _BLOCK // 2).to(torch.int16)
        parts = header, counts, inside, self._narrow(values, scale)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def read(self, messages: Tensor) -> Rows:
        """What [R, message_bytes] hold. Whatever the bytes are, places lie in [0, span]."""
        room, split = self.room, [4 * _HEADER, 4 * self.blocks, 2 * self.room, self.code.width * self.room]
        header, counts, inside, values = map(_apart, torch.split(messages, split, dim=1))
        stamp, lowest, largest, scale = header.view(torch.int32).unbind(1)
        ends = counts.view(torch.int32).cumsum(1, dtype=torch.int32)
        number = torch.arange(room, dtype=torch.int32, device=messages.device).expand(messages.shape[0], room)
        block = torch.searchsorted(ends, number.contiguous(), right=True)
        places = block * _BLOCK + inside.view(torch.int16) + _BLOCK // 2
        filled = (number < ends[:, -1:]) & (places < self.span)
        places = torch.where(filled, places, self.span)
        return Rows(stamp, lowest, largest, places, torch.where(filled, self._widen(values, scale), 0.0))

    def seen(self, values: Tensor) -> Tensor:
        """Values [R, room] as receivers will read them."""
        scale = self._scale(values)
        return self._widen(self._narrow(values, scale).view(torch.uint8), scale)

    def check(self, messages: Tensor, sender: int, what: str) -> None:
        """Raise a WireError if a message of a rank, [1, message_bytes] in host memory, is not in order."""
        counts = _apart(messages[:, 4 * _HEADER : 4 * (_HEADER + self.blocks)]).view(torch.int32)[0]
        total, least = int(counts.sum(dtype=torch.int64)), int(counts.min())
        if least < 0 or total > self.room:
            raise WireError(f"{what}: rank {sender} announced {total} entries, at most {self.room} are possible")
        rows = self.read(messages)
        places = rows.places[0, :total]
        if total and (int(places[-1]) >= self.span or bool((places[1:] <= places[:-1]).any())):
            raise WireError(f"{what}: the entries from rank {sender} are out of order or out of range")

    def _scale(self, values: Tensor) -> Tensor:
        """The biased exponent of a power of two by which the values of each row are divided: [R], int32."""
        if self.code not in _SCALED:
            return torch.full(values.shape[:1], 127, dtype=torch.int32, device=values.device)
        largest = values.abs().amax(1).view(torch.int32) >> 23
        return (largest - _SCALED[self.code]).clamp(1, 253)

    def _narrow(self, values: Tensor, scale: Tensor) -> Tensor:
        dtype = _DTYPES[self.code]
        if self.code in _SCALED:
            values = values * _power(254 - scale)[:, None]
        if self.code is not ValueCode.FP32:  # a finite value never becomes infinite
            most = torch.finfo(dtype).max
            values = values.clamp(-most, most)
        return values.to(dtype)

    def _widen(self, stream: Tensor, scale: Tensor) -> Tensor:
        values = stream.view(_DTYPES[self.code]).float()
        return values * _power(scale)[:, None] if self.code in _SCALED else values


def _apart(part: Tensor) -> Tensor:
    """A copy with memory of its own, which has the alignment that other types need."""
    return part.clone(memory_format=torch.contiguous_format)


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) for int32 in [1, 253]; what other ranks tell is forced into that range."""
    return (exponent.clamp(1, 253) << 23).view(torch.float32)


def checksum_of(messages: Tensor) -> Tensor:
    """A 64-bit checksum of bytes, 0-d: finds defects and mix-ups, not an adversary."""
    flat = messages.reshape(-1)
    words = pad(flat, (0, -flat.numel() % 4)).view(torch.int32).long()
    turn = torch.arange(1, words.numel() + 1, device=words.device)
    return ((words + turn * _FACTORS[0]) * (turn * _FACTORS[1] | 1)).sum()
