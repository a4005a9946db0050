"""Generated images, so that the trainer runs without a download: each class is a smooth colour pattern.

An image is the pattern of its class, shifted and with random contrast, plus a random pattern and noise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .dataset import InMemoryImages

CLASSES = 10
_SEED = 10
_PATTERNS, _TRAIN, _VAL = range(3)
"""Separate random streams, one per use."""
_WAVES = 3
"""The highest frequency, in periods per image width."""
_CHUNK = 256


def embedded_images(split: Literal["train", "val"], count: int, size: int, seed: int = 0) -> InMemoryImages:
    """Generate the first `count` images of a split, `size` × `size`, with alternating classes.

    The images are always the same; `seed` only affects augmentation.
    """
    random = np.random.default_rng([_SEED, size, _TRAIN if split == "train" else _VAL])
    patterns = _smooth_patterns(np.random.default_rng([_SEED, size, _PATTERNS]), CLASSES, size)
    labels = np.arange(count, dtype=np.int64) % CLASSES
    images = np.empty((count, 3, size, size), dtype=np.uint8)
    for start in range(0, count, _CHUNK):  # whole chunks are drawn: the first images do not depend on the count
        chunk = labels[start : start + _CHUNK]
        images[start : start + _CHUNK] = _draw(random, patterns, start % CLASSES)[: len(chunk)]
    return InMemoryImages(images, labels, seed)


def _draw(random: np.random.Generator, patterns: NDArray[np.float32], first: int) -> NDArray[np.uint8]:
    """Draw a chunk of images, starting with class `first`."""
    size = patterns.shape[-1]
    labels = (first + np.arange(_CHUNK)) % CLASSES
    shifts = random.integers(-(size // 8), size // 8 + 1, (_CHUNK, 2))
    contrast = random.uniform(0.4, 1.0, (_CHUNK, 1, 1, 1)).astype(np.float32)
    moved = np.stack([np.roll(patterns[c], shift, (1, 2)) for c, shift in zip(labels, shifts, strict=True)])
    noise = random.standard_normal((_CHUNK, 3, size, size), dtype=np.float32)
    values = contrast * moved + 0.5 * _smooth_patterns(random, _CHUNK, size) + 0.3 * noise
    drawn: NDArray[np.uint8] = np.clip(np.round(120.0 + 55.0 * values), 0, 255).astype(np.uint8)
    return drawn


def _smooth_patterns(random: np.random.Generator, count: int, size: int) -> NDArray[np.float32]:
    """Random low-frequency patterns [count, 3, size, size] with standard deviation 1."""
    waves = np.zeros((count, 3, size, size // 2 + 1), dtype=np.complex64)
    shape = (2, count, 3, 2 * _WAVES + 1, _WAVES + 1)
    real, imaginary = random.standard_normal(shape, dtype=np.float32)
    rows = np.arange(-_WAVES, _WAVES + 1)
    waves[:, :, rows[:, None], np.arange(_WAVES + 1)] = real + 1j * imaginary
    fields = np.fft.irfft2(waves, (size, size))
    patterns: NDArray[np.float32] = (fields / fields.std((1, 2, 3), keepdims=True)).astype(np.float32)
    return patterns
