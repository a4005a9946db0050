"""resnet50 and alexnet on a folder of images in ImageNet's layout, or on small generated images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import SGD

from ..data.images.dataset import Scale
from ..data.images.folders import read_image_folder
from ..data.images.synthetic import embedded_images
from ..data.problems import DataError
from ..models.imagenet import CLASSES, alexnet, resnet50
from ._images import ImageData, ImageTask
from .base import DataSource, Shard, Workload
from .schedules import step_decay

SCALE = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAIN, VAL, SIZE = 128, 32, 64
"""Numbers and size of the generated images; alexnet needs at least 63."""


def build(network: Callable[[], nn.Module], source: DataSource, share: Shard) -> ImageTask:
    if source.folder is None:
        train, val = embedded_images("train", TRAIN, SIZE, share.seed), embedded_images("val", VAL, SIZE)
        return ImageTask(network, ImageData(train, val, SCALE), source, share)
    return ImageTask(network, _read_folder(source.folder, share.seed), source, share)


def _read_folder(folder: Path, seed: int) -> ImageData:
    found = read_image_folder(folder, seed=seed)
    if len(found.classes) > CLASSES:
        raise DataError(f"{folder}: {len(found.classes)} classes, but the networks have {CLASSES} outputs")
    return ImageData(found.train, found.val, SCALE)


def _workload(network: Callable[[], nn.Module], batch_size: int) -> Workload:
    return Workload(
        dnn=network.__name__,
        dataset="imagenet",
        build=partial(build, network),
        batch_size=batch_size,
        max_epochs=95,
        schedule=step_decay(30, 60, 80),
        optimizer=SGD,
    )


WORKLOADS = (_workload(resnet50, batch_size=64), _workload(alexnet, batch_size=256))
