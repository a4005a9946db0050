"""Ok-Topk in static shapes: its own row of law 4, its counts, what overflows, and that no step asks the host.

The laws themselves are in tests/laws, which runs every algorithm of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import oktopk
from oktopk.algorithms.oktopk_static import StaticPlan, select_rows, static_step
from oktopk.comm import alone, total
from oktopk.comm.fixed import OverGroup, OverMessages
from oktopk.comm.messages import sealed_bytes
from oktopk.errors import WireError
from oktopk.kernels import slots
from oktopk.kernels.histograms import share_out
from oktopk.kernels.values import ValueCode
from oktopk.testing.gradients import heavy_tailed
from oktopk.testing.laws import assert_laws, run
from oktopk.wire.slots import RowLayout, SlotFormat

SIZE, DENSITY = 20_011, 0.02
K = int(SIZE * DENSITY)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_law_4_its_own_row(world: int) -> None:
    """Slots of 4 bytes, at most 1.5 · 2k(P-1)/P in each of two phases; control bytes are counted apart."""
    steps = run(world, heavy_tailed(SIZE), 3, "oktopk-static", DENSITY, values="fp16")
    assert_laws(steps)
    plan = StaticPlan(SIZE, K, 0, world, ValueCode.FP16)
    assert plan.format.slot_bytes == 4
    assert (world - 1) * plan.room <= 1.5 * 2 * K * (world - 1) / world
    for step in steps:
        for outcome in step:
            for phase in ("split", "gather"):
                sent = total(outcome.info.traffic, lambda operation, phase=phase: operation.phase == phase)
                message = sealed_bytes(plan.format.message_bytes)
                most = 8 * sent.sent_messages  # the all-gather joins messages: a length each
                assert 0 <= sent.sent_bytes - (world - 1) * message <= most
            control = total(outcome.info.traffic, lambda operation: operation.control)
            assert control.sent_bytes + outcome.info.payload.sent_bytes == total(outcome.info.traffic).sent_bytes


def drifting(rank: int, step: int) -> Tensor:
    """Gradients whose scale falls by half and grows a hundredfold in turn, and layers that take turns."""
    x = heavy_tailed(4001)(rank, step) * (0.5 if step % 7 else 100.0) * 1.02**step
    x[500 * (step % 8) :][:500] *= 30.0
    return x


def test_counts_stay_at_k_over_200_drifting_steps() -> None:
    k = int(4001 * 0.05)
    for step in run(2, drifting, 200, "oktopk-static", 0.05, values="bf16"):
        for outcome in step:
            assert 0.8 * k <= outcome.info.local_count <= 1.25 * k
            assert 0.8 * k <= outcome.info.result_count <= 1.25 * k


@pytest.mark.parametrize("k", [1, 7, 64])
def test_exactly_k_are_selected_and_they_are_the_largest(k: int) -> None:
    x = heavy_tailed(1009)(0, 0)
    layout = RowLayout(1009, 4)
    rows = layout.rows(x)
    places, values = slots.compact(rows, select_rows(rows, k, layout.span, takes_all=False).cut, layout.span)
    assert int((places < layout.span).sum()) == k
    assert sorted(values[values != 0].abs().tolist()) == sorted(x.abs().topk(k).values.tolist())


def test_what_overflows_a_row_are_its_smallest_entries() -> None:
    """All that is large lies in one row: it gives as many as it has room for, to an eighth of an octave."""
    rows = torch.zeros(4, 1000)
    rows[2] = heavy_tailed(1000)(0, 0)
    selection = select_rows(rows, 400, 100, takes_all=False)
    places, values = slots.compact(rows, selection.cut, 100)
    assert int((places < 1000).sum()) == 100
    kept = rows[2].clone()
    kept[places[2].long()] = 0.0
    assert float(kept.abs().max()) <= 2**0.125 * float(values[2].abs().min())


def test_ties_are_shared_out() -> None:
    assert share_out(torch.tensor(10), torch.tensor([9, 1, 9])).tolist() == [6, 1, 3]
    assert share_out(torch.tensor(1), torch.tensor([0, 0, 3])).tolist() == [0, 0, 1]
    assert share_out(torch.tensor(9), torch.tensor([2, 2])).tolist() == [2, 2]


@pytest.mark.parametrize(("size", "world"), [(1, 1), (1, 8), (7, 3), (1009, 4), (200_003, 3)])
def test_dealing_out_and_back_is_the_identity(size: int, world: int) -> None:
    layout, x = RowLayout(size, world), torch.randn(size)
    assert layout.rows(x).shape == (world, layout.span)
    assert torch.equal(layout.flat(layout.rows(x)), x)


@pytest.mark.parametrize("code", ValueCode)
def test_slots_reach_places_beyond_16_bits(code: ValueCode) -> None:
    form = SlotFormat(200_000, 5, code)
    places = torch.tensor([[0, 65_535, 65_536, 199_999, 200_000], [200_000] * 5], dtype=torch.int32)
    values = torch.tensor([[1.0, -2.0, 0.5, 4.0, 0.0], [0.0] * 5])
    messages = form.write(places, values, 7, torch.tensor(3), torch.tensor(9))
    assert messages.shape == (2, form.message_bytes)
    read = form.read(messages)
    assert torch.equal(read.places, places.long())
    assert torch.equal(read.values, form.seen(values))
    assert torch.equal(read.values, values)  # powers of two, which every format has
    assert (read.stamp.tolist(), read.lowest.tolist(), read.largest.tolist()) == ([7, 7], [3, 3], [9, 9])


def test_no_bytes_lead_out_of_bounds() -> None:
    form, random = SlotFormat(100_000, 40, ValueCode.FP16), torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (200, form.message_bytes), dtype=torch.uint8, generator=random)
    places = form.read(noise).places
    assert 0 <= int(places.min()) <= int(places.max()) <= form.span


def test_a_message_out_of_order_names_its_sender() -> None:
    form = SlotFormat(1000, 3)
    good = form.write(
        torch.tensor([[5, 9, 1000]], dtype=torch.int32), torch.ones(1, 3), 0, torch.tensor(0), torch.tensor(0)
    )
    form.check(good, 4, "split")
    for at, byte, problem in ((22, 3, "out of order"), (16, 4, "announced 4 entries"), (19, 0x80, "announced")):
        bad = good.clone()
        bad[0, at] = byte
        with pytest.raises(WireError, match=f"rank 4.*|.*{problem}.*rank 4"):
            form.check(bad, 4, "split")


def test_a_codec_of_a_plug_in_is_refused() -> None:
    class Halves(oktopk.ValueCodec):
        name, number, width = "halves", 201, 2

        def encode(self, values):  # type: ignore[no-untyped-def]
            return values.astype("float16").view("uint8"), 0.0

        def decode(self, stream, scale):  # type: ignore[no-untyped-def]
            return stream.view("float16").astype("float32")

    with pytest.raises(ValueError, match="oktopk-static writes values on the device"):
        oktopk.sparse_allreduce(torch.ones(10), 0.1, "oktopk-static", values=Halves())


# --- no host -------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_ranks() -> Iterator[OverGroup]:
    """Rank 0 of four that do not exist: collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield OverGroup(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("code", [ValueCode.FP32, ValueCode.FP16])
def test_a_step_never_asks_the_host(fake_ranks: OverGroup, code: ValueCode) -> None:
    """Fake tensors know their shapes only: whatever needs a value raises."""
    plan = StaticPlan(200_003, 2000, 0, 4, code)
    with FakeTensorMode():
        acc = torch.empty(200_003)
        result = static_step(plan, fake_ranks, acc, torch.zeros((), dtype=torch.int64))
        assert result.sums.shape == result.leaving.shape == acc.shape
        asking: list[Callable[[], object]] = [
            result.nonfinite.item, result.won.nonzero, lambda: acc[result.won], lambda: bool(result.differs),
        ]  # fmt: skip
        for ask in asking:  # to see that this finds a question
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                ask()


def test_a_step_makes_no_tensor_on_another_device() -> None:
    """What is made without a device lands on `meta` here, and does not mix with others."""
    acc, checksum = heavy_tailed(5000)(0, 0), torch.zeros((), dtype=torch.int64)
    with torch.device("meta"):
        result = static_step(StaticPlan(5000, 50, 0, 1, ValueCode.FP16), OverMessages(alone()), acc, checksum)
    assert {part.device.type for part in result} == {"cpu"}
