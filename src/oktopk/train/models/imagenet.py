"""Networks for images of about 224×224: ResNet-50 (25,557,032 parameters) and AlexNet (61,100,840), 1000 classes.

ResNet-50 is the usual variant with strides in the 3×3 convolutions; AlexNet is the one-column version of 2014.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .weight_init import he_normal

CLASSES = 1000
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # inner width and number of blocks
EXPANSION = 4  # width between the blocks over the width inside


class ResNet50(nn.Module):
    """A wide convolution, four stages of bottleneck blocks, a linear layer. Images of 32×32 or more."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        before = 64
        for number, (width, count) in enumerate(STAGES):
            for position in range(count):
                stride = 2 if number > 0 and position == 0 else 1
                blocks.append(Bottleneck(before, width, stride))
                before = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(before, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))  # [batch, 2048, height / 32, width / 32]
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, with a shortcut; it is a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * EXPANSION
        self.residual = nn.Sequential(
            *_convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, after, 1),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x))


class AlexNet(nn.Module):
    """Five convolutions, three linear layers. Images of 63×63 or more."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def resnet50(classes: int = CLASSES) -> ResNet50:
    return ResNet50(classes)


def alexnet(classes: int = CLASSES) -> AlexNet:
    return AlexNet(classes)


def _convolution(before: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A padded convolution and its batch normalisation."""
    convolution = nn.Conv2d(before, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(width)
