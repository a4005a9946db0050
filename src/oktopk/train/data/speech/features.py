"""The input of lstman4: a log-magnitude spectrogram."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problems import DataError
from .audio import SAMPLE_RATE

WINDOW = SAMPLE_RATE * 20 // 1000
STRIDE = SAMPLE_RATE * 10 // 1000
BINS = WINDOW // 2 + 1

_SILENT = 1e-6
"""A standard deviation below this is rounding noise: do not divide by it."""


def frame_count(samples: int) -> int:
    """Number of columns of `features`.

    >>> frame_count(16_000)
    101
    """
    return samples // STRIDE + 1


def features(sound: Tensor, source: str = "sound") -> Tensor:
    """[samples] in [-1, 1] at 16 kHz -> [161, frames], mean 0 and standard deviation 1 over the utterance.

    1. Hamming windows of 20 ms every 10 ms; the first is centred on the first sample, padded with zeros.
    2. Magnitude of the Fourier transform, log(1 + x).
    3. Subtract the mean, divide by the standard deviation; silence gives zeros.
    """
    if sound.dim() != 1:
        raise DataError(f"{source}: expected one channel, got a tensor of shape {list(sound.shape)}")
    if sound.numel() == 0:
        raise DataError(f"{source}: no samples")
    spectrum = torch.stft(
        sound.float(),
        n_fft=WINDOW,
        hop_length=STRIDE,
        window=torch.hamming_window(WINDOW, periodic=False),
        center=True,
        pad_mode="constant",
        return_complex=True,
    )
    loud = spectrum.abs().log1p_()  # [161, frames]
    mean, std = loud.mean(), loud.std()
    if not bool(std.isfinite()):
        raise DataError(f"{source}: contains non-finite samples")
    loud -= mean
    return loud / std if float(std) > _SILENT else loud.zero_()
