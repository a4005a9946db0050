"""Speech datasets and batches for lstman4: features, lengths and target classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..problems import DataError, Problem, format_problems
from . import audio, labels
from .augment import Augment
from .features import BINS, features
from .manifest import read_manifest
from .synthetic import Clip, Corpus, embedded_speech

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """One utterance that is not loaded yet."""

    name: str
    text: str
    seconds: float
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class SpeechItem:
    features: Tensor  # [161, frames]
    targets: Tensor  # [letters], int64
    text: str


@dataclass(frozen=True)
class SpeechBatch:
    """A batch for CTC; shorter utterances are padded with zeros to the longest, T."""

    features: Tensor  # [batch, 1, 161, T]
    lengths: Tensor  # [batch], frames
    targets: Tensor  # [sum of target_lengths]
    target_lengths: Tensor  # [batch]
    texts: tuple[str, ...]


class SpeechDataset(Dataset[SpeechItem]):
    """Recordings, loaded on demand. Augmentation depends on the seed, the epoch and the recording, not on the
    order of access, so that a resumed epoch gets the same samples.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        problems: Sequence[Problem] = (),
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        if not recordings:
            raise DataError(f"no utterances\n{format_problems(problems)}" if problems else "no utterances")
        self.recordings = tuple(recordings)
        self.problems = tuple(problems)
        self.augment = augment
        self.seed = seed
        self._epoch = 0

    @classmethod
    def from_manifest(
        cls, path: str | os.PathLike[str], augment: Augment | None = None, seed: int = 0
    ) -> SpeechDataset:
        """Load every usable utterance; the others are logged and listed in `problems`."""
        manifest = read_manifest(path)
        recordings: list[Recording] = []
        problems = list(manifest.problems)
        for utterance in manifest.utterances:
            try:
                labels.encode(utterance.text, str(utterance.transcript))
                info = audio.inspect(utterance.sound)
                if not info.integers:  # floating-point samples may be non-finite: check all of them
                    audio.read_sound(utterance.sound)
            except DataError as error:
                problems.append(Problem(str(path), str(error), utterance.line))
            else:
                text = labels.normalise(utterance.text)
                recordings.append(
                    Recording(str(utterance.sound), text, info.seconds, partial(audio.read_sound, utterance.sound))
                )
        if not recordings:
            raise DataError(f"{path}: no usable utterances\n{format_problems(problems)}")
        if problems:
            log.warning("%s: %d utterances were left out\n%s", path, len(problems), format_problems(problems))
        return cls(recordings, problems, augment, seed)

    @classmethod
    def embedded(
        cls,
        split: Literal["train", "val"],
        augment: Augment | None = None,
        seed: int = 0,
        corpus: Corpus | None = None,
        cache: Path | None = None,
    ) -> SpeechDataset:
        """The generated utterances."""
        corpus = embedded_speech(cache) if corpus is None else corpus
        clips = corpus.train if split == "train" else corpus.val
        return cls([_recording(clip) for clip in clips], (), augment, seed)

    @property
    def seconds(self) -> list[float]:
        """Lengths, to group similar ones into batches."""
        return [recording.seconds for recording in self.recordings]

    def find_unreadable(self) -> list[Problem]:
        """Read every recording; return those that fail although their header is valid."""
        found = []
        for recording in self.recordings:
            try:
                recording.load()
            except DataError as error:
                found.append(Problem(recording.name, str(error)))
        return found

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> SpeechItem:
        recording = self.recordings[index]
        sound = recording.load()
        if self.augment is not None:
            sound = self.augment(sound, self._generator(index % len(self)))
        targets = torch.tensor(labels.encode(recording.text, recording.name), dtype=torch.int64)
        return SpeechItem(features(sound, recording.name), targets, recording.text)

    def _generator(self, index: int) -> torch.Generator:
        words = np.random.SeedSequence([self.seed, self._epoch, index]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(words[0]) >> 1)


def collate(items: Sequence[SpeechItem]) -> SpeechBatch:
    lengths = torch.tensor([item.features.shape[1] for item in items])
    padded = torch.zeros(len(items), 1, BINS, int(lengths.max()))
    for row, item in zip(padded, items, strict=True):
        row[0, :, : item.features.shape[1]] = item.features
    return SpeechBatch(
        features=padded,
        lengths=lengths,
        targets=torch.cat([item.targets for item in items]),
        target_lengths=torch.tensor([len(item.targets) for item in items]),
        texts=tuple(item.text for item in items),
    )


def _recording(clip: Clip) -> Recording:
    seconds = len(clip.samples) / audio.SAMPLE_RATE
    return Recording(clip.name, clip.text, seconds, partial(audio.to_float, clip.samples))
