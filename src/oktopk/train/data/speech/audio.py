"""Read and write sound files: 16 kHz, one channel."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.utils.extras import install_command
from oktopk.utils.files import atomic_path, open_regular

from ..problems import DataError

SAMPLE_RATE = 16_000
SPHERE = b"NIST_1A"
FULL_SCALE = 32768.0
LONGEST_SECONDS = 3600
"""Longest file to read: a header can claim any number of samples."""


@dataclass(frozen=True)
class SoundInfo:
    frames: int
    rate: int
    channels: int
    integers: bool
    """Whether samples are integers; floating-point samples may be non-finite."""

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


def inspect(path: Path) -> SoundInfo:
    """Read the file's header; raise a DataError unless it is sound that the features accept."""
    soundfile = _soundfile()
    start = _read_header(path)
    try:
        head = soundfile.info(str(path))
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{path}: {_explain_unreadable(start, error)}") from error
    info = SoundInfo(head.frames, head.samplerate, head.channels, head.subtype.startswith("PCM_"))
    if info.rate != SAMPLE_RATE:
        raise DataError(f"{path}: {info.rate} Hz instead of {SAMPLE_RATE}; convert it first")
    if info.channels != 1:
        raise DataError(f"{path}: {info.channels} channels instead of 1; mix them down first")
    if info.frames <= 0:
        raise DataError(f"{path}: no samples")
    if info.seconds > LONGEST_SECONDS:
        raise DataError(f"{path}: lasts {info.seconds:.4g} seconds by its header; the limit is {LONGEST_SECONDS}")
    announced = _sphere_count(start)
    if announced is not None and announced > info.frames:
        raise DataError(f"{path}: truncated after {info.frames} of {announced} samples")
    return info


def read_samples(path: Path) -> NDArray[np.int16]:
    """Read all samples as 16-bit integers."""
    return np.asarray(_read(path, "int16"), dtype=np.int16)


def read_sound(path: Path) -> Tensor:
    """Read all samples as float32 in [-1, 1], shape [samples]."""
    sound = torch.from_numpy(np.asarray(_read(path, "float32"), dtype=np.float32))
    if not bool(sound.isfinite().all()):
        raise DataError(f"{path}: contains non-finite samples")
    return sound


def write_samples(path: Path, samples: NDArray[np.int16]) -> None:
    """Write a 16-bit wav file atomically. soundfile is not used: it syncs to disk after every file."""
    with atomic_path(path) as draft, wave.open(str(draft), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def to_float(samples: NDArray[np.int16]) -> Tensor:
    """Convert to the scale of read_sound."""
    return torch.from_numpy(samples.astype(np.float32) / np.float32(FULL_SCALE))


def _read(path: Path, dtype: str) -> NDArray[np.generic]:
    info = inspect(path)
    soundfile = _soundfile()
    try:
        samples, _ = soundfile.read(str(path), dtype=dtype)
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{path}: {_explain_unreadable(_read_header(path), error)}") from error
    if len(samples) != info.frames:
        raise DataError(f"{path}: truncated after {len(samples)} of {info.frames} samples")
    return np.asarray(samples)


def _read_header(path: Path) -> bytes:
    """Read the first bytes; refuses pipes, on which libsndfile would block."""
    try:
        with open_regular(path) as file:
            return file.read(1024)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _explain_unreadable(start: bytes, error: Exception) -> str:
    """Explain why a file is unreadable; libsndfile reports nearly everything as "Format not recognised"."""
    if not start:
        return "the file is empty"
    if all(byte in b"\t\n\r" or byte >= 32 for byte in start) and not start.startswith((b"RIFF", SPHERE)):
        return "text, not sound"
    return f"not a readable sound file ({error})"


def _sphere_count(start: bytes) -> int | None:
    """Number of samples in a SPHERE header: libsndfile silently accepts truncated files."""
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
        raise DataError(f"sound files need the package soundfile: {install_command('train')}") from error
    return soundfile  # type: ignore[no-any-return, unused-ignore]
