"""Thresholds from histograms of magnitudes, in static shapes: where to cut, and how ranks or rows share what ties.

As in `slots`, no call makes the host wait: numbers are 0-d tensors, and magnitudes are bits of floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .slots import INFINITY_BITS, SMALLEST_BITS

_OCTAVES, _WINDOW = 256, 768
"""Bins of the histogram of sums: one per octave below the window, and those of the window."""
_MARGIN = 4
"""The window starts so many octaves below the largest of all ranks' thresholds: sums may cancel."""


@dataclass(frozen=True)
class Window:
    """Bins of magnitudes by their bits: one per octave below `start`, then _WINDOW of equal width."""

    start: Tensor
    width: Tensor

    @classmethod
    def around(cls, lowest: Tensor, largest: Tensor, world: int) -> Window:
        start = (lowest - (_MARGIN << 23)).clamp(SMALLEST_BITS, INFINITY_BITS - 1)
        grown = (world - 1).bit_length() << 23  # sums may be so many octaves larger
        stop = (largest.clamp(0, INFINITY_BITS - 1 - grown) + grown).clamp(min=SMALLEST_BITS)
        return cls(start, (stop - start).clamp(min=0) // _WINDOW + 1)

    def count(self, bits: Tensor) -> Tensor:
        """How many magnitudes lie in each bin: int32."""
        inside = (_OCTAVES + (bits - self.start) // self.width).clamp(max=_OCTAVES + _WINDOW - 1)
        bins = torch.where(bits < self.start, bits >> 23, inside).view(-1)
        counts = torch.zeros(_OCTAVES + _WINDOW, dtype=torch.int32, device=bits.device)
        return counts.scatter_add_(0, bins.long(), torch.ones_like(counts[0]).expand(bins.shape))

    def edge(self, place: Tensor) -> Tensor:
        """The bits from which on magnitudes belong to a bin (0-d), or to later ones."""
        inside = self.start + (place - _OCTAVES).clamp(0, _WINDOW) * self.width
        beyond = torch.where(place >= _OCTAVES + _WINDOW, INFINITY_BITS, inside)
        return torch.where(place < _OCTAVES, torch.minimum(place.clamp(max=254) << 23, self.start), beyond).int()


def suffix_sums(counts: Tensor) -> Tensor:
    """[R, B] -> how many lie in each bin or a later one, int32."""
    return counts.flip(1).cumsum(1, dtype=torch.int32).flip(1)


def last_at_least(falling: Tensor, target: Tensor) -> Tensor:
    """The last place of a falling sequence that has at least `target`; 0 if there is none."""
    return ((falling >= target).sum(dtype=torch.int32) - 1).clamp(min=0)


def column(table: Tensor, place: Tensor) -> Tensor:
    """Column `place` (0-d) of [R, B]; zeros behind the last one."""
    inside = table.index_select(1, place.clamp(max=table.shape[1] - 1).long()[None])[:, 0]
    return torch.where(place < table.shape[1], inside, 0)


def share_out(total: Tensor, there: Tensor) -> Tensor:
    """Shares of `total` (0-d), equal as far as there is enough; what is left goes to the first that have more.

    >>> share_out(torch.tensor(5), torch.tensor([0, 4, 3])).tolist()
    [0, 4, 1]
    """
    number = there.numel()
    turn = torch.arange(number, dtype=torch.int32, device=there.device)
    even = torch.minimum(there, ((total + number - 1 - turn) // number).clamp(min=0))
    spare = there - even
    left = total - even.sum(dtype=torch.int32)
    return even + torch.minimum(spare, (left - (spare.cumsum(0) - spare)).clamp(min=0)).int()
