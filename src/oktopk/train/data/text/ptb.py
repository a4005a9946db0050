"""Text in the form of Penn Treebank: one sentence per line, words separated by spaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..problems import DataError
from ..shard import check_shard
from .synthetic import embedded_prose

END, UNKNOWN = "<eos>", "<unk>"
LIMIT = 10_000
WINDOW = 35
"""Words per window: how far backpropagation through time reaches."""
STRETCH = 20 * WINDOW
IGNORED = -100
"""PyTorch's ignore_index: a target that does not count."""

_TRAIN, _VALID = ("ptb.train.txt", "train.txt"), ("ptb.valid.txt", "valid.txt")


@dataclass(frozen=True)
class Vocabulary:
    """Maps words to numbers; unknown words map to <unk>.

    >>> vocabulary = Vocabulary.of("b a c a b d".split(), limit=3)
    >>> vocabulary.words, vocabulary.encode(["a", "d"]).tolist()
    (('a', 'b', '<unk>'), [0, 2])
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: Iterable[str], limit: int = LIMIT) -> Vocabulary:
        """Make a vocabulary of the most frequent words, sorted by frequency, then by name."""
        counts = Counter(text)
        unknown = counts.pop(UNKNOWN, 0)
        kept = most_frequent(counts, limit - 1)
        return cls(tuple(most_frequent({**{word: counts[word] for word in kept}, UNKNOWN: unknown}, limit)))

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: Iterable[str]) -> Tensor:
        unknown = self.numbers[UNKNOWN]
        return torch.tensor([self.numbers.get(word, unknown) for word in text], dtype=torch.int64)


def most_frequent(counts: dict[str, int], limit: int) -> list[str]:
    return sorted(counts, key=lambda word: (-counts[word], word))[:limit]


@dataclass(frozen=True)
class Text:
    vocabulary: Vocabulary
    train: Tensor  # [words], int64
    valid: Tensor


def read_text(folder: Path) -> Text:
    """Read ptb.train.txt and ptb.valid.txt, or train.txt and valid.txt."""
    return _encode(*(_add_sentence_ends(read_lines(_find_file(folder, names))) for names in (_TRAIN, _VALID)))


def embedded_text() -> Text:
    prose = embedded_prose()
    return _encode(
        *(_add_sentence_ends(s for document in part for s in document) for part in (prose.train, prose.valid))
    )


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file; an empty file is an error."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not any(line.strip() for line in lines):
        raise DataError(f"{path}: no words")
    return lines


def _find_file(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: " + (f"has no {' or '.join(names)}" if folder.is_dir() else "no such folder"))


def _add_sentence_ends(lines: Iterable[str]) -> list[str]:
    """All words, with <eos> after each sentence."""
    return [word for line in lines if line.strip() for word in (*line.split(), END)]


def _encode(train: list[str], valid: list[str]) -> Text:
    vocabulary = Vocabulary.of(train)
    return Text(vocabulary, vocabulary.encode(train), vocabulary.encode(valid))


@dataclass(frozen=True)
class Window:
    """A window of words from several columns, and the next word of each."""

    words: Tensor  # [window, columns]
    targets: Tensor  # [window, columns]
    first: bool
    """Whether it is the first window of the epoch."""

    def __len__(self) -> int:
        return self.words.shape[1]


@dataclass(frozen=True)
class Columns:
    """Training text split into P · batch columns of equal length, which are read in parallel, window by window.

    P = 2 ranks, batch 2, a text of 28 words, windows of 3:

        column    0       1       2       3
        words     0 … 5   6 … 11  12 … 17 18 … 23     24 … 27 are left out
        rank      0       1       0       1

    The text is circular, and each epoch starts at another offset, so that two successive epochs see every word.
    """

    text: Tensor  # [words]
    world: int
    rank: int
    batch: int
    nsteps: int = 1
    seed: int = 0
    window: int = WINDOW

    def __post_init__(self) -> None:
        check_shard(self.world, self.rank, self.seed, batch=self.batch, nsteps=self.nsteps, window=self.window)
        if self.steps == 0:
            raise DataError(
                f"{len(self.text)} words do not fill one step of {self.world} ranks × batch {self.batch} × "
                f"{self.nsteps} windows of {self.window}; use a smaller batch or fewer ranks"
            )

    @property
    def steps(self) -> int:
        return len(self.text) // (self.world * self.batch * self.window) // self.nsteps

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Window]:
        """Yield this rank's windows of the epoch, nsteps per step, starting at `first_step`."""
        if not 0 <= first_step <= self.steps:
            raise DataError(f"step must be in 0 … {self.steps}, got {first_step}")
        circle = torch.roll(self.text, -self._start(epoch))
        words, targets = self._own_columns(circle), self._own_columns(torch.roll(circle, -1))
        for at in range(first_step * self.nsteps * self.window, len(words), self.window):
            yield Window(words[at : at + self.window], targets[at : at + self.window], first=at == 0)

    def _own_columns(self, circle: Tensor) -> Tensor:
        """[length of a column, batch]"""
        columns = self.world * self.batch
        length = self.steps * self.nsteps * self.window
        return circle[: columns * length].view(columns, length)[self.rank :: self.world].t().contiguous()

    def _start(self, epoch: int) -> int:
        """Offset of an epoch: each one moves on by at least what the one before left out."""
        words = len(self.text)
        rest = words - self.steps * self.nsteps * self.window * self.world * self.batch
        distance = int(np.random.default_rng(self.seed).integers(rest, words - rest, endpoint=True))
        return epoch * distance % words


@dataclass(frozen=True)
class Stretches:
    """Validation text split into stretches that are the same for any number of ranks.

    Each stretch starts one window early, to warm up the hidden state; those targets are ignored, so every word
    counts once.
    """

    text: Tensor  # [words]
    before: int
    """The word before the first: <eos>."""
    world: int
    rank: int
    batch: int

    def batches(self) -> Iterator[list[Window]]:
        """Yield this rank's stretches, `batch` at a time, as lists of successive windows."""
        text = torch.cat([torch.tensor([self.before]), self.text])
        own = range(self.rank * STRETCH, len(self.text), self.world * STRETCH)
        for at in range(0, len(own), self.batch):
            yield _side_by_side([_stretch(text, start) for start in own[at : at + self.batch]])


def _stretch(text: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Words and targets of a stretch; `start` is the first word whose target counts."""
    context = max(start - WINDOW, 0)
    targets = text[context + 1 : start + STRETCH + 1].clone()
    words = text[context : context + len(targets)]
    targets[: start - context] = IGNORED
    return words, targets


def _side_by_side(stretches: Sequence[tuple[Tensor, Tensor]]) -> list[Window]:
    words, targets = zip(*stretches, strict=True)
    padded = torch.nn.utils.rnn.pad_sequence(list(words))
    expected = torch.nn.utils.rnn.pad_sequence(list(targets), padding_value=IGNORED)
    return [
        Window(padded[at : at + WINDOW], expected[at : at + WINDOW], first=at == 0)
        for at in range(0, len(padded), WINDOW)
    ]
