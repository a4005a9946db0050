"""What lstman4 hears: the logarithm of a short-time spectrum."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problems import DataError
from .audio import SAMPLE_RATE

WINDOW = SAMPLE_RATE * 20 // 1000
STRIDE = SAMPLE_RATE * 10 // 1000
BINS = WINDOW // 2 + 1

_SILENT = 1e-6
"""A spread below this is rounding, not speech: dividing by it would make noise out of nothing."""


def frames_of(samples: int) -> int:
    """How many columns `features` gives.

    >>> frames_of(16_000)
    101
    """
    return samples // STRIDE + 1


def features(sound: Tensor, source: str = "sound") -> Tensor:
    """[samples] in [-1, 1] at 16 kHz -> [161, frames], mean 0 and standard deviation 1 over the utterance.

    1. Hamming windows of 20 ms every 10 ms; the first one is centred on the first sample, zeros beyond the ends
    2. magnitude of the Fourier transform, log(1 + x)
    3. minus the mean, divided by the standard deviation; silence gives zeros
    """
    if sound.dim() != 1:
        raise DataError(f"{source}: one channel expected, got a tensor of shape {list(sound.shape)}")
    if sound.numel() == 0:
        raise DataError(f"{source}: no samples in it")
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
        raise DataError(f"{source}: holds samples that are not finite")
    loud -= mean
    return loud / std if float(std) > _SILENT else loud.zero_()
