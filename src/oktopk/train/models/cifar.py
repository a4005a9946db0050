"""Networks for images of 32×32: VGG-16 with batch normalisation, and the residual networks of He et al. (2016).

| model | parameters, 10 classes | convention |
|---|---|---|
| vgg16 | 14,728,266 | convolutions with biases, one linear layer of 512 |
| resnet20 | 269,722 | shortcuts without parameters (option A); 272,474 would have 1×1 convolutions (option B) |
| resnet56 | 853,018 | " |
| resnet110 | 1,727,962 | " |
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from .weight_init import he_normal

CLASSES = 10
VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Stages of 3×3 convolutions; each halves the size, so that 32×32 becomes 1×1 after five."""

    def __init__(self, stages: tuple[tuple[int, ...], ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in stages:
            for width in stage:
                convolution = nn.Conv2d(before, width, 3, padding=1)
                layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class ResNet(nn.Module):
    """Depth 6n + 2: a convolution, three stages of n blocks with 16, 32 and 64 channels, a linear layer."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"depth must be 6n + 2 with n of at least 1, got {depth}")
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
        self.blocks = nn.Sequential(*(Block(before, width) for before, width in pairwise(widths)))
        self.classifier = nn.Linear(64, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))  # [batch, 64, 8, 8]
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """Two convolutions beside a shortcut. Where the width grows, the image shrinks by two."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.added = width - before
        self.stride = 2 if self.added else 1
        self.residual = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=self.stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        # Option A: every second pixel, and zeros in the new channels.
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(self.residual(x) + shortcut)


def vgg16(classes: int = CLASSES) -> VGG:
    return VGG(VGG16, classes)


def resnet20(classes: int = CLASSES) -> ResNet:
    return ResNet(20, classes)


def resnet56(classes: int = CLASSES) -> ResNet:
    return ResNet(56, classes)


def resnet110(classes: int = CLASSES) -> ResNet:
    return ResNet(110, classes)
