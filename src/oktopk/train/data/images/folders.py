"""Read image files with Pillow, and folders of them: train/<class>/… and val/<class>/…"""

from __future__ import annotations

import logging
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.utils.extras import install_command
from oktopk.utils.files import open_regular

from ..problems import DataError, Problem, format_problems
from .dataset import ImageBatch, sample_random

log = logging.getLogger(__name__)

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")
SIZE = 224
_CENTRE = 224 / 256
"""Share of the shorter side: the usual resize to 256 and centre crop to 224."""
_AREA = (0.08, 1.0)
_RATIO = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS = 10
_THREADS = min(4, os.cpu_count() or 1)

Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""


@dataclass(frozen=True)
class ImageFile:
    path: Path
    label: int


class FolderImages:
    """An ImageSet of files, read on demand and resized."""

    def __init__(
        self, files: Sequence[ImageFile], problems: Sequence[Problem] = (), size: int = SIZE, seed: int = 0
    ) -> None:
        self.files = tuple(files)
        self.problems = tuple(problems)
        self.size = size
        self.seed = seed
        self._readers = ThreadPoolExecutor(_THREADS, "image reader")

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Sequence[int], epoch: int | None = None) -> ImageBatch:
        images = list(self._readers.map(partial(self._image, epoch=epoch), indices))
        return ImageBatch(torch.stack(images), torch.tensor([self.files[index].label for index in indices]))

    def _image(self, index: int, epoch: int | None) -> Tensor:
        image = read_rgb(self.files[index].path)
        width, height = image.size
        if epoch is None:
            return self._cut(image, centre_box(width, height))
        random = sample_random(self.seed, epoch, index)
        pixels = self._cut(image, random_box(width, height, random))
        return pixels.flip(-1) if random.random() < 0.5 else pixels

    def _cut(self, image: Any, box: Box) -> Tensor:
        resized = image.resize((self.size, self.size), _pillow().Resampling.BILINEAR, box)
        return torch.from_numpy(pixels_of(resized))


@dataclass(frozen=True)
class ImageFolder:
    classes: tuple[str, ...]
    train: FolderImages
    val: FolderImages


def read_image_folder(folder: str | os.PathLike[str], size: int = SIZE, seed: int = 0) -> ImageFolder:
    """Read every image with a valid header; the others are logged and listed in `problems`.

    The classes are the folders in train, sorted by name. Files without an image suffix are ignored; folders below
    a class belong to it.
    """
    train, val = Path(folder) / "train", Path(folder) / "val"
    classes = _class_names(train)
    unknown = sorted(set(_class_names(val)) - set(classes))
    if unknown:
        raise DataError(f"{val}: classes missing from {train}: {', '.join(unknown)}; remove or rename them")
    return ImageFolder(classes, *(_read_split(split, classes, size, seed) for split in (train, val)))


def _class_names(split: Path) -> tuple[str, ...]:
    try:
        found = sorted(path.name for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        layout = "expected train/<class>/… and val/<class>/…"
        raise DataError(f"{split}: {error.strerror}; {layout}") from error
    if not found:
        raise DataError(f"{split}: no folders found; expected one per class, with its images")
    return tuple(found)


def _read_split(split: Path, classes: Sequence[str], size: int, seed: int) -> FolderImages:
    files: list[ImageFile] = []
    problems: list[Problem] = []
    for label, name in enumerate(classes):
        if not (split / name).is_dir():
            continue  # validation need not have every class
        paths = list(_image_paths(split / name))
        if not paths:
            problems.append(Problem(str(split / name), "no images of this class"))
        for path in paths:
            try:
                image_size(path)
            except DataError as error:
                problems.append(Problem(str(path), str(error).removeprefix(f"{path}: ")))
            else:
                files.append(ImageFile(path, label))
    if not files:
        raise DataError(f"{split}: no usable images\n{format_problems(problems)}")
    if problems:
        log.warning("%s: %d images or classes were left out\n%s", split, len(problems), format_problems(problems))
    return FolderImages(files, problems, size, seed)


def _image_paths(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in ENDINGS and not path.name.startswith(".") and not path.is_dir():
            yield path


def centre_box(width: int, height: int, share: float = _CENTRE) -> Box:
    """The centre square whose side is this share of the shorter side.

    >>> centre_box(512, 256)
    (144.0, 16.0, 368.0, 240.0)
    """
    side = min(width, height) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """Draw a box of 8 % to 100 % of the area and a ratio of 3:4 to 4:3; the centre if the image is too narrow."""
    areas = random.uniform(*_AREA, _ATTEMPTS) * width * height
    ratios = np.exp(random.uniform(*_RATIO, _ATTEMPTS))
    widths, heights = np.round(np.sqrt(areas * ratios)), np.round(np.sqrt(areas / ratios))
    place = random.random(2)
    fitting = np.flatnonzero((widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height))
    if len(fitting) == 0:
        return centre_box(width, height, 1.0)
    across, down = float(widths[fitting[0]]), float(heights[fitting[0]])
    left, upper = float(np.floor(place[0] * (width - across + 1))), float(np.floor(place[1] * (height - down + 1)))
    return left, upper, left + across, upper + down


def image_size(path: Path) -> tuple[int, int]:
    """Width and height from the file's header; the rest is not read."""
    with _open(path, str(path)) as image:
        return int(image.size[0]), int(image.size[1])


def read_rgb(file: Path | BinaryIO, name: str | None = None, size: tuple[int, int] | None = None) -> Any:
    """Decode to a Pillow image with three channels; a DataError starts with the name of the file.

    With `size`, an image of any other is refused before it is decoded: a kilobyte can be a hundred million pixels.
    """
    with _open(file, name or str(file)) as image:
        if size is not None and image.size != size:
            raise DataError("{}×{} pixels instead of {}×{}".format(*image.size, *size))
        if "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB")


def pixels_of(image: Any) -> NDArray[np.uint8]:
    """[3, height, width]"""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


@contextmanager
def _open(file: Path | BinaryIO, name: str) -> Iterator[Any]:
    module = _pillow()
    try:
        opened: AbstractContextManager[BinaryIO] = (
            open_regular(file) if isinstance(file, Path) else nullcontext(file)
        )
        with opened as content, module.open(content) as image:
            yield image
    except module.UnidentifiedImageError as error:
        raise DataError(f"{name}: not an image") from error
    # Pillow's readers raise these for damaged files, besides its own errors.
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"{name}: {getattr(error, 'strerror', None) or error}") from error
    except module.DecompressionBombError as error:
        raise DataError(f"{name}: {error}") from error


def _pillow() -> ModuleType:
    try:
        import PIL.Image  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(f"image files need the package pillow: {install_command('train')}") from error
    return PIL.Image  # type: ignore[no-any-return, unused-ignore]
