"""Generated speech, so that the trainer runs without a download: each letter becomes a sound.

Every letter has its own spectrum (two resonances and a hiss), every speaker a pitch, size, speed and voice, and
every recording its noise. No human would understand it, but a network learns it as it learns AN4.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oktopk.utils.files import write_atomically

from ..problems import DataError
from .audio import SAMPLE_RATE
from .phrases import phrase

log = logging.getLogger(__name__)

VERSION = 1
"""Increase it with every change of the generated speech: caches of other versions are ignored."""
TRAIN, VAL = 512, 64
_TRAIN_SPEAKERS, _VAL_SPEAKERS = 32, 8
_SEED = 4
_SEGMENT = 2048
"""Longest letter, in samples."""
_BINS = np.fft.rfftfreq(_SEGMENT, 1 / SAMPLE_RATE)
_EDGE = SAMPLE_RATE * 15 // 1000


@dataclass(frozen=True)
class Clip:
    name: str
    speaker: str
    text: str
    samples: NDArray[np.int16]


@dataclass(frozen=True)
class Corpus:
    """Validation uses other speakers and phrases than training."""

    train: tuple[Clip, ...]
    val: tuple[Clip, ...]


@dataclass(frozen=True)
class Speaker:
    name: str
    pitch: float  # Hz
    size: float  # resonances are multiplied by it
    letter_seconds: float
    breath: float  # noise in the voice
    tilt: float  # how fast the voice gets softer with frequency

    @staticmethod
    def number(index: int) -> Speaker:
        random = np.random.default_rng([_SEED, 1, index])
        low, high = ((90, 150), (160, 240))[index % 2]
        return Speaker(
            name=f"speaker{index:02d}",
            pitch=float(random.uniform(low, high)),
            size=float(random.uniform(0.94, 1.06)),
            letter_seconds=float(random.uniform(0.075, 0.095)),
            breath=float(random.uniform(0.05, 0.2)),
            tilt=float(random.uniform(0.6, 1.2)),
        )


def embedded_speech(cache: Path | None = None) -> Corpus:
    """Load the speech from the cache; if it is missing or damaged, generate it, which takes a few seconds."""
    folder = cache_folder() if cache is None else cache
    path = folder / f"embedded-speech-v{VERSION}.bin"
    try:
        return _unpack(path.read_bytes())
    except FileNotFoundError:
        log.info("generating speech into %s", path)
    except (OSError, DataError) as error:
        log.warning("generating speech again: %s: %s", path, error)
    corpus = generate()
    try:
        write_atomically(path, _pack(corpus))
    except OSError as error:
        log.warning("could not cache the generated speech: %s: %s", path, error.strerror)
    return corpus


def cache_folder() -> Path:
    return Path(os.environ.get("OKTOPK_CACHE") or Path.home() / ".cache" / "oktopk")


def generate(train: int = TRAIN, val: int = VAL) -> Corpus:
    """Generate the first utterances of the corpus; they are always the same."""
    random = np.random.default_rng([_SEED, 0])
    reserved: list[str] = []
    while len(reserved) < VAL:
        said = phrase(random)
        if " " in said and said not in reserved:  # single commands stay in the training data
            reserved.append(said)
    spoken: list[str] = []
    while len(spoken) < TRAIN:
        said = phrase(random)
        if said not in reserved:
            spoken.append(said)
    return Corpus(
        tuple(_clip(f"train{i:03d}", i % _TRAIN_SPEAKERS, text) for i, text in enumerate(spoken[:train])),
        tuple(_clip(f"val{i:03d}", _TRAIN_SPEAKERS + i % _VAL_SPEAKERS, t) for i, t in enumerate(reserved[:val])),
    )


def _clip(name: str, speaker_number: int, text: str) -> Clip:
    speaker = Speaker.number(speaker_number)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return Clip(name, speaker.name, text, speak(text, speaker, np.random.default_rng([_SEED, 2, seed])))


def speak(text: str, speaker: Speaker, random: np.random.Generator) -> NDArray[np.int16]:
    """Synthesise the letters one after the other, with pauses for spaces and background noise."""
    seconds = speaker.letter_seconds * random.uniform(0.85, 1.15, len(text))
    steps = (seconds * SAMPLE_RATE).astype(int)
    lead, tail = (int(n) for n in random.integers(SAMPLE_RATE // 10, SAMPLE_RATE // 5, 2))
    sound = np.zeros(lead + int(steps.sum()) + _SEGMENT + tail)
    pitch = speaker.pitch * random.uniform(0.95, 1.05)
    at = lead
    for letter, step in zip(text, steps, strict=True):
        if letter != " ":
            length = min(int(step) + _EDGE, _SEGMENT)
            sound[at : at + length] += _letter(letter, length, pitch, speaker, random)
        at += int(step)
        pitch *= 0.995  # the pitch falls towards the end
    sound = sound[: at + tail]
    level = float(np.sqrt(np.mean(sound**2))) or 1.0
    sound = sound / level + random.standard_normal(len(sound)) * 10 ** (-random.uniform(18, 30) / 20)
    loudness = random.uniform(0.25, 0.7) / float(np.abs(sound).max())
    return np.round(sound * loudness * 32767).astype(np.int16)


def resonances(letter: str) -> tuple[float, float, float]:
    """Two resonances and the hiss of a letter, in Hz; the combination is unique.

    >>> len({resonances(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ'"})
    27
    """
    number = 26 if letter == "'" else ord(letter) - ord("A")
    return 280.0 + 150.0 * (number % 5), 1250.0 + 380.0 * (number // 5), 4200.0 + 600.0 * (number * 2 % 5)


def _letter(
    letter: str, length: int, pitch: float, speaker: Speaker, random: np.random.Generator
) -> NDArray[np.float64]:
    """Shape a buzz at the speaker's pitch, plus breath noise, with the letter's resonances."""
    low, high, hiss = (place * speaker.size for place in resonances(letter))
    phase = np.arange(_SEGMENT) * (pitch / SAMPLE_RATE) + random.random()
    buzz = np.diff(np.floor(phase), prepend=np.floor(phase[0])) * np.sqrt(SAMPLE_RATE / pitch)
    noise = random.standard_normal(_SEGMENT)
    voice = _bump(low, 70.0) + 0.8 * _bump(high, 110.0)
    voice /= 1.0 + speaker.tilt * _BINS / 3000.0
    shaped = np.fft.rfft(buzz + speaker.breath * noise) * voice + np.fft.rfft(noise) * 0.35 * _bump(hiss, 250.0)
    ramp = 0.5 - 0.5 * np.cos(np.pi * (np.arange(_EDGE) + 0.5) / _EDGE)
    sound = np.fft.irfft(shaped)[:length]
    sound[:_EDGE] *= ramp
    sound[-_EDGE:] *= ramp[::-1]
    return sound / float(np.sqrt(np.mean(sound**2)))


def _bump(center: float, width: float) -> NDArray[np.float64]:
    bump: NDArray[np.float64] = np.exp(-0.5 * ((_BINS - center) / width) ** 2)
    return bump


def _pack(corpus: Corpus) -> bytes:
    """Pack a SHA-256 of the rest, then an npz with all samples and a description of the clips."""
    clips = corpus.train + corpus.val
    about = json.dumps(
        {
            "train": len(corpus.train),
            "clips": [(clip.name, clip.speaker, clip.text, len(clip.samples)) for clip in clips],
        }
    )
    out = io.BytesIO()
    samples = np.concatenate([clip.samples for clip in clips])
    np.savez(out, samples=samples, about=np.frombuffer(about.encode(), dtype=np.uint8))
    return hashlib.sha256(out.getbuffer()).digest() + out.getvalue()


def _unpack(content: bytes) -> Corpus:
    digest, body = content[:32], content[32:]
    if hashlib.sha256(body).digest() != digest:
        raise DataError("the cache is damaged")
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            samples, about = arrays["samples"], json.loads(arrays["about"].tobytes())
        ends = np.cumsum([length for *_, length in about["clips"]])
        parts = np.split(samples, ends[:-1])
        clips = tuple(
            Clip(name, who, text, part) for (name, who, text, _), part in zip(about["clips"], parts, strict=True)
        )
        train = int(about["train"])
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"the cache has unexpected content: {error!r}") from error
    return Corpus(clips[:train], clips[train:])
