"""vgg16 and the small residual networks on CIFAR-10, or on generated images of its size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import SGD

from ..data.images.cifar import SCALE, read_cifar
from ..data.images.synthetic import embedded_images
from ..models.cifar import resnet20, resnet56, resnet110, vgg16
from ._images import ImageData, ImageTask
from .base import DataSource, Shard, Workload
from .schedules import step_decay

TRAIN, VAL, SIZE = 2048, 512, 32
"""Numbers and size of the generated images."""


def build(network: Callable[[], nn.Module], source: DataSource, share: Shard) -> ImageTask:
    if source.folder is None:
        train, val = embedded_images("train", TRAIN, SIZE, share.seed), embedded_images("val", VAL, SIZE)
    else:
        train, val = read_cifar(source.folder, share.seed)
    return ImageTask(network, ImageData(train, val, SCALE), source, share)


def _workload(network: Callable[[], nn.Module], max_epochs: int = 161) -> Workload:
    return Workload(
        dnn=network.__name__,
        dataset="cifar10",
        build=partial(build, network),
        batch_size=16,
        max_epochs=max_epochs,
        schedule=step_decay(81, 122, 155, warmup_epochs=10),
        optimizer=SGD,
    )


WORKLOADS = (_workload(vgg16), _workload(resnet20, max_epochs=141), _workload(resnet56), _workload(resnet110))
