"""Speech recognition: two convolutions over the spectrogram, LSTM layers, a lookahead layer, CTC labels.

    [batch, 1, 161, T]  conv 41×11 /2×2   conv 21×11 /2×1    [T', batch, 1312]   T' = ⌈T / 2⌉
                        LSTM → norm → LSTM → … → LSTM        [T', batch, 800]
                        lookahead over 21 steps → norm → linear → log-softmax    [T', batch, 29]

The LSTM layers are unidirectional, so padding after a sample cannot reach its frames, and packed sequences (three
times slower on CPUs) are not needed. The layers that mix frames, convolutions and normalisation, see zeros there
or nothing: neither the output nor the batch statistics depend on the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FREQUENCIES = 161  # bins of a 20 ms window at 16 kHz
LABELS = 29  # blank, apostrophe, A to Z, space
CLIP = 20.0  # of the clipped ReLU
CONTEXT = 20  # future steps of the lookahead

Shape = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # kernel, stride, padding: frequency × time
SHAPES: tuple[Shape, ...] = (((41, 11), (2, 2), (20, 5)), ((21, 11), (2, 1), (10, 5)))
Size = TypeVar("Size", int, Tensor)


@dataclass(frozen=True)
class Widths:
    """Channels of the convolutions, units of each LSTM layer, number of LSTM layers."""

    channels: int = 32
    hidden: int = 800
    layers: int = 5


class SpeechLSTM(nn.Module):
    """forward(spectrograms [batch, 1, 161, T], lengths [batch]) returns log-probabilities [T', batch, labels] and
    the number of steps of each sample, as ctc_loss expects them.
    """

    def __init__(self, widths: Widths, labels: int = LABELS) -> None:
        super().__init__()
        channels, hidden = widths.channels, widths.hidden
        inputs = (1, channels)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(n, channels, *shape) for n, shape in zip(inputs, SHAPES, strict=True)
        )
        activations = (nn.Sequential(nn.BatchNorm1d(channels), nn.Hardtanh(0.0, CLIP)) for _ in SHAPES)
        self.activations = nn.ModuleList(activations)
        height = FREQUENCIES
        for shape in SHAPES:
            height = _output_size(height, shape, 0)
        sizes = [channels * height] + [hidden] * (widths.layers - 1)
        self.lstms = nn.ModuleList(nn.LSTM(size, hidden) for size in sizes)
        self.lstm_norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in sizes[1:])
        self.lookahead = Lookahead(hidden, CONTEXT)
        self.output_norm = nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, labels, bias=False)

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        _check(spectrograms, lengths)
        steps = self.output_lengths(lengths)
        x = self._convolve(spectrograms, lengths)  # [batch, T', features]
        x = x.transpose(0, 1)  # [T', batch, features]
        frames = Frames.within(x.shape[0], steps.to(x.device), time_first=True)
        x, _ = self.lstms[0](x)
        for norm, lstm in zip(self.lstm_norms, self.lstms[1:], strict=True):
            x, _ = lstm(frames.apply(norm, x))
        x = self.lookahead(frames.only(x))
        x = self.output(frames.apply(self.output_norm, x))
        return F.log_softmax(x, dim=-1), steps

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Output steps of samples of these lengths."""
        for shape in SHAPES:
            lengths = _output_size(lengths, shape, 1)
        return lengths

    def _convolve(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[batch, 1, frequencies, T] to [batch, T', channels · height], zero after each sample's end."""
        lengths = lengths.to(x.device)
        frames = Frames.within(x.shape[-1], lengths)
        x = frames.only(x.permute(0, 3, 1, 2))  # [batch, T, channels, height]
        for convolution, activation, shape in zip(self.convolutions, self.activations, SHAPES, strict=True):
            # With channels last, the second convolution takes a third of the time on CPUs.
            x = x.permute(0, 2, 3, 1).contiguous(memory_format=torch.channels_last)
            x = convolution(x).permute(0, 3, 1, 2)
            lengths = _output_size(lengths, shape, 1)
            frames = Frames.within(x.shape[1], lengths)
            x = frames.apply(activation, x)
        return x.flatten(2)


@dataclass(frozen=True)
class Frames:
    """The real frames of a padded batch, as an index into the batch with its first two dimensions flattened."""

    index: Tensor

    @staticmethod
    def within(time: int, lengths: Tensor, time_first: bool = False) -> Frames:
        """Frames of a batch [batch, time, …], or [time, batch, …], whose samples end at these lengths."""
        real = torch.arange(time, device=lengths.device) < lengths[:, None]
        return Frames((real.t() if time_first else real).flatten().nonzero().flatten())

    def apply(self, function: nn.Module, x: Tensor) -> Tensor:
        """Apply the function to the real frames [frames, …] and put them back, with zeros elsewhere."""
        # An index computed once: x[mask] would search the mask each time, and synchronise a GPU.
        y = function(x.flatten(0, 1).index_select(0, self.index))
        rest = y.new_zeros(x.shape[0] * x.shape[1], *y.shape[1:])
        out: Tensor = rest.index_copy(0, self.index, y).unflatten(0, x.shape[:2])
        return out

    def only(self, x: Tensor) -> Tensor:
        """Replace padding with zeros, even where it is infinite."""
        return self.apply(nn.Identity(), x)


class Lookahead(nn.Module):
    """Each unit's weighted sum of its own step and the `context` steps after it; [T, batch, units]."""

    def __init__(self, units: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.convolution = nn.Conv1d(units, units, context + 1, groups=units, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ahead = F.pad(x.permute(1, 2, 0), (0, self.context))  # [batch, units, T + context]
        out: Tensor = self.convolution(ahead).permute(2, 0, 1)
        return out


def lstman4(labels: int = LABELS) -> SpeechLSTM:
    """The original model: 27,569,568 parameters with 29 labels."""
    return SpeechLSTM(Widths(), labels)


def lstman4_small(labels: int = LABELS) -> SpeechLSTM:
    """A narrow version for CPUs, with about a million parameters."""
    return SpeechLSTM(Widths(channels=4, hidden=160), labels)


def _output_size(size: Size, shape: Shape, axis: int) -> Size:
    """Output size of a convolution of this shape along frequency (axis 0) or time (axis 1)."""
    kernel, stride, padding = (pair[axis] for pair in shape)
    return (size + 2 * padding - kernel) // stride + 1


def _check(spectrograms: Tensor, lengths: Tensor) -> None:
    if spectrograms.ndim != 4 or spectrograms.shape[1:3] != (1, FREQUENCIES):
        got = list(spectrograms.shape)
        raise ValueError(f"spectrograms must have shape [batch, 1, {FREQUENCIES}, time], got {got}")
    batch, time = spectrograms.shape[0], spectrograms.shape[3]
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape [{batch}], one per sample, got {list(lengths.shape)}")
    if batch == 0 or int(lengths.min()) < 1 or int(lengths.max()) > time:
        raise ValueError(f"lengths must be between 1 and {time} frames, got {lengths.tolist()}")
