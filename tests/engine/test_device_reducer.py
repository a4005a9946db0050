"""`oktopk-static` by the collectives of the device: the same bits as over messages, and nothing asks the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import oktopk
from oktopk.algorithms import OkTopkStatic
from oktopk.comm import Metered, alone
from oktopk.comm.fixed import OverGroup, OverMessages
from oktopk.engine.bucket_state import BucketGroup, BucketState, Handed
from oktopk.engine.device.reducer import DeviceReducer, Figures
from oktopk.engine.settings import Settings
from oktopk.errors import WireError
from oktopk.feedback.buckets import Bucket
from oktopk.feedback.residuals import ResidualStore
from tests.support import worlds

SIZES = {"a.weight": 700, "a.bias": 30, "b.weight": 900, "unused": 50}
STEPS, BAD = 6, 3


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """One parameter is never used here, another one by rank 0 only in every second step; one step has a NaN."""
    random = torch.Generator().manual_seed(100 * step + rank)
    found = {name: (torch.randn(size, generator=random) ** 3).to(dtype) for name, size in SIZES.items()}
    found["unused"].zero_()
    if rank == 0 and step % 2:
        found["b.weight"].zero_()
    if step == BAD and rank == 1:
        found["a.weight"][17] = math.nan
    return found


def train(comm: oktopk.Communicator, resident: bool, **options: Any) -> dict[str, Any]:
    """What all steps give, and what is left at the end."""
    dtype = options.pop("dtype", torch.float32)
    named = [(name, torch.zeros(size, dtype=dtype, requires_grad=True)) for name, size in SIZES.items()]
    reducer = oktopk.AllReducer(
        named, OkTopkStatic(resident=resident), 0.05, comm, warmup_steps=1, max_skipped=3, **options
    )
    means, skipped = [], []
    for step in range(STEPS):
        means.append({name: x.clone() for name, x in reducer.sync(gradients(comm.rank, step, dtype)).items()})
        skipped.append(reducer.skipped)
    state = reducer.state_dict()
    return {
        "means": means,
        "skipped": skipped,
        "residuals": state["residuals"],
        "sent": reducer.stats()["sent_bytes"],
    }


CASES: dict[str, dict[str, Any]] = {
    "one bucket": {"buckets": "model"},
    "many groups": {"buckets": 0.001, "fusion_entries": 0},
    "16-bit slots, fused": {"buckets": 0.001, "values": "fp16"},
    "16-bit gradients, some always dense": {"dtype": torch.bfloat16, "dense": ["*.bias"], "values": "bf16"},
}


def both(connect: Callable[..., oktopk.Communicator]) -> dict[str, Any]:
    comm = connect(timeout=30.0)
    return {
        name: [train(comm, resident, **dict(case)) for resident in (True, False)] for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return worlds.run("gloo", 3, both)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_collectives_of_a_group_give_the_bits_of_messages(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        resident, messages = rank[case]
        assert resident["skipped"] == messages["skipped"] == [step == BAD for step in range(STEPS)]
        for ours, theirs in zip(resident["means"], messages["means"], strict=True):
            for name in SIZES:
                assert torch.equal(ours[name], theirs[name]), name
        for name, theirs in messages["residuals"].items():
            assert torch.equal(resident["residuals"][name], theirs), name
        assert 0 < resident["sent"] < messages["sent"]  # no seals, no digests


# --- on one rank ---------------------------------------------------------------------------------------------


def reducer_of_one() -> tuple[DeviceReducer, BucketGroup, Callable[[Tensor], Figures | None]]:
    """A group of one bucket, and a function that makes one step of it as a GPU does: nothing is read early."""
    settings = Settings(OkTopkStatic(resident=True), 0.1, 0)
    residuals = ResidualStore()
    reducer = DeviceReducer(settings, Metered(alone()), residuals, unused_stay=True)
    state = BucketState(Bucket(("x",), (100,)), 0, torch.empty(0, dtype=torch.int64))
    group = BucketGroup((state,))
    steps = iter(range(100))

    def step(grad: Tensor) -> Figures | None:
        number = next(steps)
        reducer.reduce(OverMessages(alone()), group, [Handed(state, grad, None)], 0.1, number)
        figures = reducer.read()
        reducer.finish(number)
        return figures

    return reducer, group, step


def test_a_skipped_step_is_known_one_step_later_and_changes_nothing() -> None:
    reducer, group, step = reducer_of_one()
    good = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert step(good.clone()) is None
    before = reducer._residuals.state_dict()["x"]
    bad = good.clone()
    bad[3] = math.inf
    figures = step(bad)
    assert figures is not None
    assert (figures.step, figures.nonfinite, figures.local_count, figures.result_count) == (0, False, 10, 10)
    assert not bad.any()  # the optimizer finds zeros
    assert torch.equal(reducer._residuals.state_dict()["x"], before)
    figures = step(good.clone())
    assert figures is not None
    assert (figures.step, figures.nonfinite) == (1, True)
    assert group.tracking is not None


def test_ranks_that_differ_are_an_error_one_step_later() -> None:
    reducer, group, step = reducer_of_one()
    step(torch.ones(100))
    group.tracking = group.tracking + 1
    step(torch.ones(100))
    assert reducer.last is not None  # the one rank there is agrees with itself
    reducer._told = (7, torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64), None)
    with pytest.raises(WireError, match="by step 7: ranks differ"):
        reducer.read()


def test_a_step_that_is_given_up_keeps_its_gradient() -> None:
    reducer, group, _ = reducer_of_one()
    grad = torch.arange(100.0)
    (state,) = group.members
    reducer.reduce(OverMessages(alone()), group, [Handed(state, grad, None)], 0.1, 0)
    reducer.drop(keep=True)
    assert torch.equal(reducer._residuals.state_dict()["x"], torch.arange(100.0))


def test_a_whole_step_never_asks_the_host() -> None:
    """Two fused buckets, some entries always dense, from gradient to mean: fake tensors raise."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with FakeTensorMode():
            residuals = ResidualStore()
            settings = Settings(OkTopkStatic(resident=True), 0.01, 0, values="fp16")
            reducer = DeviceReducer(settings, Metered(alone()), residuals, unused_stay=True)
            states = [
                BucketState(
                    Bucket((f"{place}.weight", f"{place}.bias"), (9000, 50)), place, torch.arange(9000, 9050)
                )
                for place in range(2)
            ]
            handed = [
                Handed(states[0], torch.empty(9050), None),
                Handed(states[1], torch.empty(9050, dtype=torch.half), 8.0),
            ]
            reducer.reduce(OverGroup(dist.group.WORLD), BucketGroup(tuple(states)), handed, 0.01, 0)
            reducer.finish(0)
    finally:
        dist.destroy_process_group()
