"""Augment speech for training: change tempo and gain, keep the words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..problems import DataError
from .audio import SAMPLE_RATE

_FRAME = SAMPLE_RATE * 32 // 1000
_HOP = _FRAME // 2
_REACH = SAMPLE_RATE * 8 // 1000
"""How far a piece may shift to match the one before: more than a period of the lowest voice."""

_COARSE = 4
"""Compare pieces at every fourth sample: 4 kHz is enough for voices and takes a third of the time."""


def change_tempo(sound: Tensor, tempo: float) -> Tensor:
    """Make it faster (> 1) or slower at the same pitch: [samples] -> [round(samples / tempo)].

    Waveform similarity overlap-add:
    1. The output consists of overlapping pieces of 32 ms, one every 16 ms.
    2. Piece i comes from around i · 16 ms · tempo of the input.
    3. It is shifted by up to 8 ms to where it best matches the continuation of the piece before.
    """
    if not tempo > 0:
        raise DataError(f"tempo must be positive, got {tempo}")
    length = max(round(len(sound) / tempo), min(len(sound), 1))
    if tempo == 1.0 or len(sound) < _FRAME:
        return sound[:length] if tempo >= 1.0 else torch.nn.functional.pad(sound, (0, length - len(sound)))
    pieces = -(-length // _HOP) + 1
    margin = _FRAME + _REACH
    # zeros on both sides, so that every piece is complete
    x = np.pad(sound.numpy().astype(np.float32), (margin, 2 * margin + int(_FRAME * tempo)))
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)).astype(
        np.float32
    )  # sums to 1 at half steps
    out = np.zeros((pieces + 1) * _HOP, dtype=np.float32)
    start = margin - _HOP
    for piece in range(pieces):
        if piece:
            start = _best_start(x, start + _HOP, margin - _HOP + round(piece * _HOP * tempo))
        out[piece * _HOP : piece * _HOP + _FRAME] += window * x[start : start + _FRAME]
    return torch.from_numpy(out[_HOP : _HOP + length].copy())


def _best_start(x: NDArray[np.float32], natural: int, nominal: int) -> int:
    """Find the place near `nominal` where the input best matches the input at `natural`."""
    wanted = x[natural : natural + _HOP : _COARSE]  # the part that overlaps the piece before
    around = x[nominal - _REACH : nominal + _REACH + _HOP : _COARSE]
    likeness = np.correlate(around, wanted, mode="valid")  # [2 reach / coarse + 1]
    power = np.zeros(len(around) + 1)
    np.cumsum(around * around, out=power[1:])
    norm = np.sqrt(power[len(wanted) :] - power[: -len(wanted)] + 1e-9)
    return nominal - _REACH + _COARSE * int(np.argmax(likeness / norm))


def change_gain(sound: Tensor, decibel: float) -> Tensor:
    """Make it louder or softer, without clipping.

    >>> change_gain(torch.tensor([0.1, -0.5]), 20.0)
    tensor([ 0.2000, -1.0000])
    """
    peak = float(sound.abs().max()) if len(sound) else 0.0
    factor = 10.0 ** (decibel / 20.0)
    return sound * (min(factor, 1.0 / peak) if peak > 0 else 1.0)


@dataclass(frozen=True)
class Augment:
    """Draws tempo and gain uniformly from their ranges; the same generator state gives the same sound."""

    tempo: tuple[float, float] = (0.85, 1.15)
    gain: tuple[float, float] = (-6.0, 8.0)

    def __post_init__(self) -> None:
        if not 0 < self.tempo[0] <= self.tempo[1]:
            raise DataError(f"tempo must be a range of positive numbers, got {self.tempo}")
        if not self.gain[0] <= self.gain[1]:
            raise DataError(f"gain must be a range, got {self.gain}")

    def __call__(self, sound: Tensor, generator: torch.Generator) -> Tensor:
        tempo, gain = torch.rand(2, generator=generator).tolist()
        faster = change_tempo(sound, _between(self.tempo, tempo))
        return change_gain(faster, _between(self.gain, gain))


def _between(bounds: tuple[float, float], share: float) -> float:
    return bounds[0] + share * (bounds[1] - bounds[0])
