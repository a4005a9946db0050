"""resnet50 and alexnet on a folder of images as ImageNet has it, or on small embedded ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import SGD

from ..data.images.folders import read_image_folder
from ..data.images.patterns import embedded_images
from ..data.images.pictures import Scale
from ..data.problems import DataError
from ..models.imagenet import CLASSES, alexnet, resnet50
from ._images import ImageData, ImageTask
from .base import Share, Source, Workload
from .schedules import tenth_at

SCALE = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAIN, VAL, SIZE = 128, 32, 64
"""Of the embedded images; alexnet takes none that is smaller than 63."""


def build(network: Callable[[], nn.Module], source: Source, share: Share) -> ImageTask:
    if source.folder is None:
        train, val = embedded_images("train", TRAIN, SIZE, share.seed), embedded_images("val", VAL, SIZE)
        return ImageTask(network, ImageData(train, val, SCALE), source, share)
    return ImageTask(network, _folder(source.folder, share.seed), source, share)


def _folder(folder: Path, seed: int) -> ImageData:
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
        schedule=tenth_at(30, 60, 80),
        optimizer=SGD,
    )


WORKLOADS = (_workload(resnet50, batch_size=64), _workload(alexnet, batch_size=256))
