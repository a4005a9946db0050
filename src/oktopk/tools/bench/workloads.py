"""The backward pass of a step: prepared gradients in given shapes, or a real network.

Forward and optimizer are not timed. Parameters never change, so that all contenders get the same gradients and
share the memory of the parameters.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .gradients import Gradients

Shape = tuple[int, ...]
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""ResNet-50: width inside the blocks, and number of blocks."""
_EXPANSION, _CLASSES = 4, 1000
_SIDE = 1024
_WINDOWS = 1 << 22
"""Number of window offsets in the pool."""
_LAYERS, _BATCH = 10, 256
_BLOCKS, _HEADS, _SEQUENCE, _SEQUENCES = 4, 4, 64, 8


class Workload(Protocol):
    """The workload of one rank, shared by its contenders."""

    size: int
    """Parameters of a replica."""

    def replica(self) -> nn.Module:
        """A model for one contender; all replicas share the memory of their parameters."""
        ...

    def prepare(self, step: int) -> None:
        """Prepare the gradients of this step, for all contenders."""
        ...

    def loss(self, model: nn.Module) -> Tensor:
        """Run the forward pass of a replica or of its DDP wrapper."""
        ...


class Prepared:
    """A backward pass that only copies prepared gradients to the buckets."""

    def __init__(self, shapes: Sequence[Shape], rank: int) -> None:
        self.size = sum(map(math.prod, shapes))
        self.gradients = Gradients(self.size, rank)
        self._values = _cut(torch.zeros(self.size), shapes)
        self._parts = _cut(self.gradients.buffer, shapes)

    def replica(self) -> nn.Module:
        return _PreparedModel(self._values, self._parts)

    def prepare(self, step: int) -> None:
        self.gradients.at(step)

    def loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model()
        return loss


class Pooled:
    """Like Prepared, but each layer copies a window of a small pool: for models with hundreds of millions of
    parameters.

    The windows change from step to step and are the same on all ranks, so that the ranks share a mean.
    """

    def __init__(self, shapes: Sequence[Shape], rank: int) -> None:
        self.size = sum(map(math.prod, shapes))
        self._values = _cut(torch.zeros(self.size), shapes)
        self._pool = Gradients(_WINDOWS + max(map(math.prod, shapes)), rank).at(0).clone()
        self._parts = [self._pool[: math.prod(shape)].view(shape) for shape in shapes]

    def replica(self) -> nn.Module:
        return _PreparedModel(self._values, self._parts)

    def prepare(self, step: int) -> None:
        starts = torch.randint(0, _WINDOWS, (len(self._parts),), generator=torch.Generator().manual_seed(step))
        for index, (part, start) in enumerate(zip(self._parts, starts.tolist(), strict=True)):
            self._parts[index] = self._pool[start : start + part.numel()].view(part.shape)

    def loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model()
        return loss


class _PreparedModel(nn.Module):
    """A chain of parameters; backward reaches them from the last to the first, as in a network."""

    def __init__(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(map(nn.Parameter, values))
        self._gradients = gradients

    def forward(self) -> Tensor:
        x = torch.zeros(())
        for parameter, gradient in zip(self.parts, self._gradients, strict=True):
            x = _attach_gradient(x, parameter, gradient)
        return x


class _PreparedGradient(torch.autograd.Function):
    """Returns its first input; backward gives the second input a prepared gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # Autograd takes a new view without a copy, and DDP copies it to its bucket once.
        return grads[0], ctx.gradient.view_as(ctx.gradient), None


_attach_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = _PreparedGradient.apply


class Computing:
    """A real network, with new random inputs in every step."""

    def __init__(self, network: nn.Module, input_shape: Shape, rank: int) -> None:
        self._network = network
        self.size = sum(parameter.numel() for parameter in network.parameters())
        self._input = torch.empty(input_shape)
        self._random = torch.Generator().manual_seed(1 + rank)

    def replica(self) -> nn.Module:
        own = copy.deepcopy(self._network)
        for mine, shared in zip(own.parameters(), self._network.parameters(), strict=True):
            mine.data = shared.data
        return own

    def prepare(self, step: int) -> None:
        self._input.normal_(generator=self._random)

    def loss(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(self._input).square().mean()
        return loss


def _cut(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    edges = [0, *itertools.accumulate(math.prod(shape) for shape in shapes)]
    places = itertools.starmap(slice, itertools.pairwise(edges))
    return [flat[place].view(shape) for place, shape in zip(places, shapes, strict=True)]


def resnet50_shapes() -> list[Shape]:
    """Shapes of its 161 parameters, in layer order.

    >>> sum(map(math.prod, resnet50_shapes()))
    25557032
    """
    shapes = list(_convolution(3, 64, 7))
    before = 64
    for width, blocks in _STAGES:
        after = width * _EXPANSION
        for _ in range(blocks):
            shapes += [*_convolution(before, width, 1), *_convolution(width, width, 3)]
            shapes += _convolution(width, after, 1)
            if before != after:
                shapes += _convolution(before, after, 1)
            before = after
    return [*shapes, (_CLASSES, before), (_CLASSES,)]


def _convolution(before: int, width: int, kernel: int) -> Iterator[Shape]:
    """Shapes of a convolution without bias and its batch normalisation."""
    yield from ((width, before, kernel, kernel), (width,), (width,))


def synthetic_shapes(size: int) -> list[Shape]:
    """Square matrices of up to a million entries, and a vector for the rest.

    >>> synthetic_shapes(2_097_155)
    [(1024, 1024), (1024, 1024), (3,)]
    >>> synthetic_shapes(10_001)
    [(100, 100), (1,)]
    """
    side = min(_SIDE, math.isqrt(size))
    count, rest = divmod(size, side * side)
    return [(side, side)] * count + [(rest,)] * (rest > 0)


def _mlp(size: int, rank: int) -> Workload:
    width = max(1, round(math.sqrt(size / _LAYERS)))
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    return Computing(nn.Sequential(*layers), (_BATCH, width), rank)


def _transformer(size: int, rank: int) -> Workload:
    width = _HEADS * max(1, round(math.sqrt(size / (12 * _BLOCKS)) / _HEADS))
    block = nn.TransformerEncoderLayer(width, _HEADS, 4 * width, dropout=0.0, batch_first=True)
    network = nn.TransformerEncoder(block, _BLOCKS, enable_nested_tensor=False)
    return Computing(network, (_SEQUENCES, _SEQUENCE, width), rank)


MODELS: dict[str, tuple[int, Callable[[int, int], Workload]]] = {
    "resnet50-shapes": (25_557_032, lambda size, rank: Prepared(resnet50_shapes(), rank)),
    "synthetic": (25_000_000, lambda size, rank: Prepared(synthetic_shapes(size), rank)),
    "pooled": (200_000_000, lambda size, rank: Pooled(synthetic_shapes(size), rank)),
    "mlp": (2_600_000, _mlp),
    "transformer": (3_000_000, _transformer),
}
"""By name: the default size, and a function that makes the workload for (size, rank)."""


def make_workload(model: str, size: int, rank: int) -> Workload:
    torch.manual_seed(0)
    return MODELS[model][1](size, rank)
