"""What contenders are given: the same to all of them, other numbers in every step and on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oktopk.tools.bench.workloads import (
    MODELS,
    Prepared,
    Workload,
    make_workload,
    resnet50_shapes,
    synthetic_shapes,
)
from oktopk.train.models.imagenet import resnet50

SHAPES = [(3, 5), (7,), (2, 3, 1)]


def gradients(workload: Workload, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    workload.loss(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_shapes_are_those_of_the_network() -> None:
    with torch.device("meta"):
        network = resnet50()
    assert resnet50_shapes() == [tuple(parameter.shape) for parameter in network.parameters()]


@pytest.mark.parametrize("size", [1, 2, 1023, 10_000, 2**20, 2**20 + 1, 3_000_017])
def test_synthetic_shapes_have_the_size_asked_for(size: int) -> None:
    assert sum(torch.Size(shape).numel() for shape in synthetic_shapes(size)) == size


def test_backward_hands_over_what_was_prepared_and_copies_nothing() -> None:
    workload = Prepared(SHAPES, rank=2)
    model = workload.replica()
    for step in (4, 5):
        workload.prepare(step)
        flat = torch.cat([gradient.flatten() for gradient in gradients(workload, model)])
        assert torch.equal(flat, workload.gradients.buffer)
    places = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    assert places[0] == workload.gradients.buffer.data_ptr()
    assert len(places) == len(SHAPES)


def test_backward_comes_by_the_last_parameter_first() -> None:
    workload, came = Prepared(SHAPES, rank=0), []
    model = workload.replica()
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: came.append(index))
    gradients(workload, model)
    assert came == [2, 1, 0]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet50-shapes"])
def test_contenders_get_the_same_and_steps_and_ranks_do_not(name: str) -> None:
    size = 40_000
    first, second = make_workload(name, size, rank=0), make_workload(name, size, rank=1)
    one, other, elsewhere = first.replica(), first.replica(), second.replica()
    for mine, yours in zip(one.parameters(), other.parameters(), strict=True):
        assert mine is not yours
        assert mine.data_ptr() == yours.data_ptr()
    assert sum(parameter.numel() for parameter in one.parameters()) == pytest.approx(size, rel=0.25)
    for workload in (first, second):
        workload.prepare(0)
    found = gradients(first, one)
    assert same(found, gradients(first, other))
    assert not same(found, gradients(second, elsewhere))
    first.prepare(1)
    assert not same(found, gradients(first, one))
    assert all(bool(gradient.count_nonzero()) for gradient in found)
