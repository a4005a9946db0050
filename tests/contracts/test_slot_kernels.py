"""Selection in static shapes: Triton's kernels equal those of torch to the bit, on a GPU or in the interpreter."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from oktopk.kernels import slots
from oktopk.kernels.slots import COARSE_BITS, Cut
from tests.support.kernels.backends import DEVICE, ON_DEVICE

cuda_slots = pytest.importorskip(
    "oktopk.kernels.cuda.slots", reason="no Triton on this platform", exc_type=ImportError
)
pytestmark = ON_DEVICE


def awkward(count: int, span: int) -> Tensor:
    """Usual numbers, ties, zeros of both signs, subnormal ones, and what is not finite."""
    x = torch.randn(count, span, generator=torch.Generator().manual_seed(span)) ** 3
    x[0, : span // 3] = 0.75
    x[-1, -3:] = torch.tensor([-0.0, 1e-41, float("nan")])[-min(3, span) :]
    x[-1, 0] = float("inf")
    return x.to(DEVICE)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("count", "span"), [(1, 1), (2, 63), (3, 64), (2, 200)])
def test_counts_are_those_of_the_reference(count: int, span: int) -> None:
    rows = awkward(count, span)
    with patch.object(cuda_slots, "BLOCK", 64), patch.object(cuda_slots, "TURNS", 2):
        assert torch.equal(cuda_slots.count_coarse(rows), slots.count_coarse(rows))
        for bits in (0x3F400000, 0, 0x7F800000):
            one = ints(bits >> COARSE_BITS)[0]
            assert torch.equal(cuda_slots.count_fine(rows, one), slots.count_fine(rows, one))


@pytest.mark.parametrize("room", [1, 9, 200])
@pytest.mark.parametrize("quota", [0, 5, 1000])
def test_a_cut_takes_what_the_reference_takes(quota: int, room: int) -> None:
    rows = awkward(2, 200)
    for low, top in ((0x3F400000, 0x3F400001), (0x3F000000, 0x3FC00000), (0, 0)):
        cut = Cut(ints(low, low), ints(top, top), ints(quota, quota // 2))
        with patch.object(cuda_slots, "BLOCK", 64):
            ours, theirs = cuda_slots.compact(rows, cut, room), slots.compact(rows, cut, room)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1].view(torch.int32), theirs[1].view(torch.int32))
