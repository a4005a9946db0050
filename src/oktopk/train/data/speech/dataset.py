"""Utterances as lstman4 takes them: features, lengths and classes, alone and in batches."""

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

from ..problems import DataError, Problem, listing
from . import audio, labels
from .augment import Augment
from .features import BINS, features
from .manifest import read_manifest
from .synth import Clip, Corpus, embedded_speech

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """One utterance before it is read."""

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
    """What CTC needs; the longest utterance gives T, the others are filled up with zeros."""

    features: Tensor  # [batch, 1, 161, T]
    lengths: Tensor  # [batch], frames
    targets: Tensor  # [sum of target_lengths]
    target_lengths: Tensor  # [batch]
    texts: tuple[str, ...]


class SpeechDataset(Dataset[SpeechItem]):
    """Recordings, read when they are asked for. What augmentation does to one depends on the seed, the epoch and
    the recording, not on the order of reading: a resumed epoch hears the same.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        problems: Sequence[Problem] = (),
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        if not recordings:
            raise DataError(f"no utterances\n{listing(problems)}" if problems else "no utterances")
        self.recordings = tuple(recordings)
        self.problems = tuple(problems)
        self.augment = augment
        self.seed = seed
        self._epoch = 0

    @classmethod
    def from_manifest(
        cls, path: str | os.PathLike[str], augment: Augment | None = None, seed: int = 0
    ) -> SpeechDataset:
        """Every usable utterance; what is wrong with the others is logged, and stays in `problems`."""
        manifest = read_manifest(path)
        recordings: list[Recording] = []
        problems = list(manifest.problems)
        for said in manifest.utterances:
            try:
                labels.encode(said.text, str(said.transcript))
                info = audio.inspect(said.sound)
                if not info.integers:  # only those can be believed without a look at every sample
                    audio.read_sound(said.sound)
            except DataError as error:
                problems.append(Problem(str(path), str(error), said.line))
            else:
                text = labels.normalise(said.text)
                recordings.append(
                    Recording(str(said.sound), text, info.seconds, partial(audio.read_sound, said.sound))
                )
        if not recordings:
            raise DataError(f"{path}: no usable utterances\n{listing(problems)}")
        if problems:
            log.warning("%s: %d utterances were left out\n%s", path, len(problems), listing(problems))
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
        """The synthesiser's utterances."""
        corpus = embedded_speech(cache) if corpus is None else corpus
        clips = corpus.train if split == "train" else corpus.val
        return cls([_recording(clip) for clip in clips], (), augment, seed)

    @property
    def seconds(self) -> list[float]:
        """The lengths to sort batches by."""
        return [recording.seconds for recording in self.recordings]

    def unreadable(self) -> list[Problem]:
        """Recordings whose head promises what the rest does not hold: every one of them is read."""
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
