"""Read CIFAR-10 in its binary form, or convert an archive of JPEG files to it."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from oktopk.utils.files import read_regular, write_atomically

from ..archive import Limits, read_members
from ..problems import DataError, Problem, format_problems
from .dataset import InMemoryImages, Scale
from .folders import ENDINGS, pixels_of, read_rgb

log = logging.getLogger(__name__)

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SCALE = Scale((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FOLDER = "cifar-10-batches-bin"
_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE  # the label, then red, green and blue row by row
_LIMITS = Limits(file_bytes=1 << 20, total_bytes=1 << 30, headers=200_000)  # of 60,000 images, a kilobyte each

Images: TypeAlias = NDArray[np.uint8]  # [n, 3, 32, 32]
Labels: TypeAlias = NDArray[np.int64]  # [n]


@dataclass(frozen=True)
class ImportSummary:
    folder: Path
    train: int
    test: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class _Entry:
    name: str
    split: str
    label: int
    content: bytes


def read_cifar(folder: str | os.PathLike[str], seed: int = 0) -> tuple[InMemoryImages, InMemoryImages]:
    """Read training and test images from the folder, or from `cifar-10-batches-bin` in it."""
    root = _root(Path(folder))
    parts = [_read_file(root / name) for name in TRAIN_FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return InMemoryImages(images, labels, seed), InMemoryImages(*_read_file(root / TEST_FILE))


def write_cifar(
    folder: str | os.PathLike[str], images: Images, labels: Labels, test_images: Images, test_labels: Labels
) -> None:
    """Write the six files atomically, the test images last."""
    if len(images) < len(TRAIN_FILES) or len(test_images) == 0:
        raise DataError(f"{len(images)} + {len(test_images)} images are too few: each of the six files needs one")
    records, test_records = _records(images, labels), _records(test_images, test_labels)
    for name, part in zip(TRAIN_FILES, np.array_split(records, len(TRAIN_FILES)), strict=True):
        write_atomically(Path(folder) / name, part.tobytes())
    write_atomically(Path(folder) / TEST_FILE, test_records.tobytes())


def import_cifar(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
) -> ImportSummary:
    """Convert `{train,test}/<class>/*.jpg`, in an archive or a folder, to the binary files.

    The summary lists images that cannot be used; all others are kept. `progress` is called with the number of
    images done and the total.
    """
    source, destination = Path(source), Path(destination)
    problems: list[Problem] = []
    found = _entries(source, problems)
    # Interleave the classes, so that each of the five files has all of them.
    found.sort(key=lambda entry: (PurePosixPath(entry.name).name, entry.label))
    kept: dict[str, list[tuple[NDArray[np.uint8], int]]] = {"train": [], "test": []}
    for done, entry in enumerate(found, 1):
        try:
            kept[entry.split].append((_decode(entry), entry.label))
        except DataError as error:
            problems.append(Problem(entry.name, str(error).removeprefix(f"{entry.name}: ")))
        if progress is not None:
            progress(done, len(found))
    _check_kept(source, {split: len(rows) for split, rows in kept.items()}, problems)
    write_cifar(destination, *_arrays(kept["train"]), *_arrays(kept["test"]))
    if problems:
        log.warning("%s: %d images were left out\n%s", source, len(problems), format_problems(problems))
    return ImportSummary(destination, len(kept["train"]), len(kept["test"]), tuple(problems))


def _check_kept(source: Path, counts: dict[str, int], problems: Sequence[Problem]) -> None:
    """Require one image for each of the five training files and the test file, before anything is written."""
    if counts["train"] >= len(TRAIN_FILES) and counts["test"] >= 1:
        return
    raise DataError(
        f"{source}: {counts['train']} training and {counts['test']} test images are not CIFAR-10; it must hold "
        "{train,test}/<class>/*.jpg (the published binary archive only needs to be unpacked)\n"
        + format_problems(problems)
    )


def _root(folder: Path) -> Path:
    wanted = (*TRAIN_FILES, TEST_FILE)
    for candidate in (folder, folder / FOLDER):
        missing = [name for name in wanted if not (candidate / name).is_file()]
        if not missing:
            return candidate
        if len(missing) < len(wanted):
            raise DataError(f"{candidate}: {', '.join(missing)} missing; unpack or import CIFAR-10 again")
    what = "no such folder" if not folder.is_dir() else f"neither {TRAIN_FILES[0]} nor {FOLDER} in it"
    raise DataError(
        f"{folder}: {what}; it must hold the binary version of CIFAR-10, unpacked, or what "
        "`oktopk data cifar10 SOURCE FOLDER` makes of an archive of images"
    )


def _read_file(path: Path) -> tuple[Images, Labels]:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if len(content) == 0 or len(content) % _RECORD:
        raise DataError(
            f"{path}: {len(content):,} bytes are not whole records of {_RECORD:,}; the file is truncated or not "
            "CIFAR-10: unpack or import it again"
        )
    records = content.reshape(-1, _RECORD)
    wrong = np.flatnonzero(records[:, 0] >= len(CLASSES))
    if len(wrong):
        label = records[wrong[0], 0]
        raise DataError(
            f"{path}: record {wrong[0]} has label {label}, expected a label below {len(CLASSES)}; the file is "
            "damaged or not CIFAR-10: unpack or import it again"
        )
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, _SIDE, _SIDE), records[:, 0].astype(np.int64)


def _records(images: Images, labels: Labels) -> NDArray[np.uint8]:
    if images.dtype != np.uint8 or images.shape[1:] != (3, _SIDE, _SIDE):
        raise DataError(f"images must be bytes [n, 3, {_SIDE}, {_SIDE}], got {images.dtype} {images.shape}")
    if labels.shape != images.shape[:1] or not ((labels >= 0) & (labels < len(CLASSES))).all():
        raise DataError(f"{len(images)} images need as many labels, from 0 to {len(CLASSES) - 1}")
    return np.concatenate([labels.astype(np.uint8)[:, None], images.reshape(len(images), -1)], axis=1)


def _decode(entry: _Entry) -> NDArray[np.uint8]:
    return pixels_of(read_rgb(io.BytesIO(entry.content), entry.name, (_SIDE, _SIDE)))


def _arrays(rows: Sequence[tuple[NDArray[np.uint8], int]]) -> tuple[Images, Labels]:
    return np.stack([image for image, _ in rows]), np.array([label for _, label in rows], dtype=np.int64)


def _entries(source: Path, problems: list[Problem]) -> list[_Entry]:
    """Read all images, still encoded: about a kilobyte each."""
    if source.is_dir():
        return list(_from_folder(source, problems))
    if not source.is_file():
        raise DataError(f"{source}: no such archive or folder")
    return list(_from_archive(source, problems))


def _from_archive(source: Path, problems: list[Problem]) -> Iterator[_Entry]:
    """Nothing is unpacked, so names are harmless."""
    for member in read_members(source, _LIMITS, ENDINGS):
        place = _split_and_label(member.name, problems)
        if place is None:
            continue
        if member.content is None:
            problems.append(Problem(member.name, f"not a regular file of at most {_LIMITS.file_bytes:,} bytes"))
        else:
            yield _Entry(member.name, *place, member.content)


def _from_folder(source: Path, problems: list[Problem]) -> Iterator[_Entry]:
    for path in sorted(source.rglob("*")):
        place = None if path.is_dir() else _split_and_label(path.relative_to(source).as_posix(), problems)
        if place is None:
            continue
        try:
            yield _Entry(str(path), *place, read_regular(path, _LIMITS.file_bytes))
        except OSError as error:
            problems.append(Problem(str(path), error.strerror or str(error)))


def _split_and_label(name: str, problems: list[Problem]) -> tuple[str, int] | None:
    """Split and label of an image, from the two folders above it."""
    path = PurePosixPath(name)
    if path.suffix.lower() not in ENDINGS or path.name.startswith(".") or len(path.parts) < 3:
        return None
    split, kind = path.parts[-3:-1]
    if split not in ("train", "test") or kind not in CLASSES:
        problems.append(Problem(name, "not in {train,test}/<class> with a class of CIFAR-10"))
        return None
    return split, CLASSES.index(kind)
