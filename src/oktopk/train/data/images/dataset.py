"""Batches of images, in-memory datasets, and the augmentation of small images: shift and mirror."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..problems import DataError, Problem

_AUGMENTATION = 5
"""The random stream of augmentation, separate from that of the sample order."""


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of the channels, for values in [0, 1]."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise bytes [batch, 3, height, width] to float32, on their device."""
        mean, deviation = (
            torch.tensor(values, device=images.device).mul_(255).view(3, 1, 1)
            for values in (self.mean, self.deviation)
        )
        return images.float().sub_(mean).div_(deviation)


@dataclass(frozen=True)
class ImageBatch:
    """A batch of images as bytes; they are normalised on the model's device, which moves a quarter of the data."""

    images: Tensor  # [batch, 3, height, width], uint8
    labels: Tensor  # [batch], int64

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> ImageBatch:
        return ImageBatch(self.images.to(device), self.labels.to(device))


class ImageSet(Protocol):
    """The samples of one split."""

    @property
    def problems(self) -> Sequence[Problem]: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int | None = None) -> ImageBatch:
        """Return these samples; with an epoch, augmented as a function of the seed, the epoch and the sample."""
        ...


class InMemoryImages:
    """An ImageSet of images of one size, held in memory."""

    problems: Sequence[Problem] = ()

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], seed: int = 0) -> None:
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != np.uint8:
            raise DataError(f"images must be bytes [n, 3, height, width], got {images.dtype} {images.shape}")
        if labels.shape != images.shape[:1]:
            raise DataError(f"{labels.shape} labels for {len(images)} images")
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int], epoch: int | None = None) -> ImageBatch:
        chosen = torch.tensor(indices, dtype=torch.int64)
        images, labels = self.images[chosen], self.labels[chosen]
        if epoch is None:
            return ImageBatch(images, labels)
        pad = self.images.shape[-1] // 8  # 4 of 32, as is usual for CIFAR
        draws = [sample_random(self.seed, epoch, index) for index in indices]
        shifts = torch.tensor([random.integers(0, 2 * pad + 1, 2).tolist() for random in draws])
        mirrored = torch.tensor([random.random() < 0.5 for random in draws])
        return ImageBatch(shift_and_mirror(images, pad, shifts, mirrored), labels)


def sample_random(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random generator of one sample in one epoch."""
    return np.random.default_rng([seed, epoch, index, _AUGMENTATION])


def shift_and_mirror(images: Tensor, pad: int, shifts: Tensor, mirrored: Tensor) -> Tensor:
    """Pad each image with `pad` black pixels, crop it at `shifts`, and mirror it where `mirrored` is true.

    `shifts` [batch, 2] are rows and columns from 0 to 2 · pad; `pad` is the centre. `mirrored` is [batch].

    >>> image = torch.arange(3).view(1, 1, 1, 3)
    >>> shift_and_mirror(image, 1, torch.tensor([[1, 1]]), torch.tensor([True])).tolist()
    [[[[2, 1, 0]]]]
    >>> shift_and_mirror(image, 1, torch.tensor([[1, 2]]), torch.tensor([False])).tolist()
    [[[[1, 2, 0]]]]
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    across = torch.arange(width).expand(count, -1)
    across = torch.where(mirrored[:, None], width - 1 - across, across)
    rows = shifts[:, 0, None] + torch.arange(height)  # [batch, height]
    columns = shifts[:, 1, None] + across  # [batch, width]
    every = torch.arange(count)[:, None, None]
    cut = padded[every, :, rows[:, :, None], columns[:, None, :]]  # [batch, height, width, 3]
    return cut.permute(0, 3, 1, 2).contiguous()
