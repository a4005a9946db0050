"""Sound files: 16 kHz, one channel; soundfile reads them."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.utils.files import atomic_path, open_regular

from ..problems import DataError

SAMPLE_RATE = 16_000
SPHERE = b"NIST_1A"
FULL_SCALE = 32768.0
LONGEST_SECONDS = 3600
"""A head can announce any number of samples; room is made for so many at most."""


@dataclass(frozen=True)
class SoundInfo:
    frames: int
    rate: int
    channels: int
    integers: bool
    """Samples are whole numbers; others may be infinite, or none at all."""

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def inspect(path: Path) -> SoundInfo:
    """What the file's head says; a DataError unless it is sound as the features need it."""
    soundfile = _soundfile()
    start = _start(path)
    try:
        head = soundfile.info(str(path))
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{path}: {_why_unreadable(start, error)}") from error
    info = SoundInfo(head.frames, head.samplerate, head.channels, head.subtype.startswith("PCM_"))
    if info.rate != SAMPLE_RATE:
        raise DataError(f"{path}: {info.rate} Hz instead of {SAMPLE_RATE}; convert it first")
    if info.channels != 1:
        raise DataError(f"{path}: {info.channels} channels instead of 1; mix them down first")
    if info.frames <= 0:
        raise DataError(f"{path}: no samples in it")
    if info.seconds > LONGEST_SECONDS:
        raise DataError(f"{path}: says that it lasts {info.seconds:.4g} seconds; cut it to {LONGEST_SECONDS}")
    announced = _sphere_count(start)
    if announced is not None and announced > info.frames:
        raise DataError(f"{path}: cut off after {info.frames} of {announced} samples")
    return info


def read_samples(path: Path) -> NDArray[np.int16]:
    """All samples as 16-bit integers."""
    return np.asarray(_read(path, "int16"), dtype=np.int16)


def read_sound(path: Path) -> Tensor:
    """All samples, float32 in [-1, 1], shape [samples]."""
    sound = torch.from_numpy(np.asarray(_read(path, "float32"), dtype=np.float32))
    if not bool(sound.isfinite().all()):
        raise DataError(f"{path}: holds samples that are not finite")
    return sound


def write_samples(path: Path, samples: NDArray[np.int16]) -> None:
    """A 16-bit wav file, whole or not at all. Not by soundfile: it waits for the disk after every file."""
    with atomic_path(path) as draft, wave.open(str(draft), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def to_float(samples: NDArray[np.int16]) -> Tensor:
    """The same scale that read_sound gives."""
    return torch.from_numpy(samples.astype(np.float32) / np.float32(FULL_SCALE))


def _read(path: Path, dtype: str) -> NDArray[np.generic]:
    info = inspect(path)
    soundfile = _soundfile()
    try:
        samples, _ = soundfile.read(str(path), dtype=dtype)
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{path}: {_why_unreadable(_start(path), error)}") from error
    if len(samples) != info.frames:
        raise DataError(f"{path}: cut off after {len(samples)} of {info.frames} samples")
    return np.asarray(samples)


def _start(path: Path) -> bytes:
    """Its first bytes; libsndfile would wait for a pipe."""
    try:
        with open_regular(path) as file:
            return file.read(1024)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _why_unreadable(start: bytes, error: Exception) -> str:
    """libsndfile says "Format not recognised" to nearly everything; look for ourselves first."""
    if not start:
        return "the file is empty"
    if all(byte in b"\t\n\r" or byte >= 32 for byte in start) and not start.startswith((b"RIFF", SPHERE)):
        return "text instead of sound"
    return f"not a readable sound file ({error})"


def _sphere_count(start: bytes) -> int | None:
    """How many samples a SPHERE head announces: libsndfile reads on silently when a file was cut off."""
    if not start.startswith(SPHERE):
        return None
    for line in start.split(b"\n"):
        words = line.split()
        if len(words) == 3 and words[0] == b"sample_count" and words[2].isdigit():
            return int(words[2])
    return None


def _soundfile() -> ModuleType:
    try:
        import soundfile  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DataError("sound files need the package soundfile: pip install 'oktopk[train]'") from error
    return soundfile  # type: ignore[no-any-return, unused-ignore]
