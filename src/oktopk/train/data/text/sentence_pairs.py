"""Sentence pairs with masked words for BERT: [CLS] a [SEP] b [SEP], where b follows a or is random."""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..problems import DataError
from .ptb import IGNORED, most_frequent, read_lines
from .synthetic import embedded_prose

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LENGTH = 128
LIMIT = 30_522
VOCABULARY_FILE = "vocab.txt"
MASKED, REPLACED_BY_MASK, REPLACED_BY_ANY = 0.15, 0.8, 0.1
_ROOM = LENGTH - 3
_LONGEST_WORD = 100

Sentence = tuple[int, ...]


def split_words(text: str) -> list[str]:
    """Split into lower-case words without accents; every punctuation mark is a word.

    >>> split_words("Don't go, Émile!")
    ['don', "'", 't', 'go', ',', 'emile', '!']
    """
    letters = unicodedata.normalize("NFD", text.lower())
    return "".join(map(_normalise_letter, letters)).split()


def _normalise_letter(letter: str) -> str:
    """Keep a letter, make it a word of its own, or drop it."""
    kind = unicodedata.category(letter)
    if letter.isspace():
        return " "
    if kind == "Mn" or kind[0] == "C":  # accents and control characters
        return ""
    is_ideograph = "\u3400" <= letter <= "\u4dbf" or "\u4e00" <= letter <= "\u9fff"
    return f" {letter} " if is_ideograph or kind[0] == "P" or letter in string.punctuation else letter


@dataclass(frozen=True)
class WordPieces:
    """A WordPiece vocabulary: words and parts of words; parts that continue a word are written ##part.

    >>> pieces = WordPieces((*SPECIAL, "un", "##do", "##ing", "do"))
    >>> pieces.encode("Undoing nothing")
    (5, 6, 7, 1)
    """

    pieces: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> WordPieces:
        """Read one piece per line; the line number, from 0, is the number of the piece."""
        pieces = [line.rstrip() for line in read_lines(path)]
        while not pieces[-1]:
            pieces.pop()
        missing = [special for special in SPECIAL if special not in pieces]
        if missing:
            raise DataError(f"{path}: not a WordPiece vocabulary: {', '.join(missing)} missing")
        return cls(tuple(pieces))

    @classmethod
    def of(cls, sentences: Iterable[str], limit: int = LIMIT) -> WordPieces:
        """Make a vocabulary of the most frequent whole words."""
        counts = Counter(word for sentence in sentences for word in split_words(sentence))
        return cls((*SPECIAL, *most_frequent(counts, limit - len(SPECIAL))))

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """Numbers of all pieces but the special ones."""
        return np.array([number for number, piece in enumerate(self.pieces) if piece not in SPECIAL])

    def encode(self, text: str) -> Sentence:
        return tuple(chain.from_iterable(self._word(word) for word in split_words(text)))

    @cached_property
    def _known(self) -> dict[str, Sentence]:
        return {}

    def _word(self, word: str) -> Sentence:
        if word not in self._known:
            self._known[word] = self._pieces_of(word)
        return self._known[word]

    def _pieces_of(self, word: str) -> Sentence:
        """Split greedily into the longest pieces from left to right; [UNK] if that fails."""
        found: list[int] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            ends = range(len(word), start, -1)
            candidates = (("##" if start else "") + word[start:end] for end in ends)
            piece = next((candidate for candidate in candidates if candidate in self.numbers), None)
            if piece is None:
                break
            found.append(self.numbers[piece])
            start += len(piece) - (2 if start else 0)
        return tuple(found) if start == len(word) else (self.numbers[UNKNOWN],)


@dataclass(frozen=True)
class Documents:
    """Training and validation documents, each a list of sentences."""

    pieces: WordPieces
    train: Sequence[Sequence[str]]
    valid: Sequence[Sequence[str]]


def read_documents(folder: Path) -> Documents:
    """Read train.txt and valid.txt, or a single text file, whose last twentieth is used for validation.

    Each line is a sentence; empty lines separate documents. The vocabulary is vocab.txt, or the words of the
    training text.
    """
    train, valid = (_documents(lines) for lines in _train_and_valid(folder))
    vocabulary = folder / VOCABULARY_FILE
    pieces = WordPieces.read(vocabulary) if vocabulary.is_file() else WordPieces.of(chain.from_iterable(train))
    return Documents(pieces, train, valid)


def embedded_documents() -> Documents:
    prose = embedded_prose()
    return Documents(WordPieces.of(chain.from_iterable(prose.train)), prose.train, prose.valid)


def _train_and_valid(folder: Path) -> tuple[list[str], list[str]]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    train, valid = folder / "train.txt", folder / "valid.txt"
    if train.is_file() and valid.is_file():
        return read_lines(train), read_lines(valid)
    texts = [path for path in sorted(folder.glob("*.txt")) if path.name != VOCABULARY_FILE]
    if len(texts) != 1:
        raise DataError(
            f"{folder}: expected train.txt and valid.txt, or a single text file; found "
            f"{', '.join(path.name for path in texts) or 'no text file'}"
        )
    lines = read_lines(texts[0])
    cut = len(lines) * 95 // 100
    return lines[:cut], lines[cut:]


def _documents(lines: Iterable[str]) -> list[list[str]]:
    groups = groupby(lines, key=lambda line: bool(line.strip()))
    return [list(group) for has_words, group in groups if has_words]


@dataclass(frozen=True)
class Passage:
    """Two or more consecutive sentences, about as many as fit."""

    document: int
    sentences: tuple[Sentence, ...]


def passages(document: int, sentences: Sequence[Sentence]) -> Iterator[Passage]:
    """Split a document into passages; a single last sentence is joined by the one before it."""
    start = 0
    while start < len(sentences) and len(sentences) > 1:
        start = min(start, len(sentences) - 2)
        end = start + 2
        while end < len(sentences) and sum(map(len, sentences[start : end + 1])) <= _ROOM:
            end += 1
        yield Passage(document, tuple(sentences[start:end]))
        start = end


@dataclass(frozen=True)
class PairBatch:
    """Tensors [batch, 128]; `random` is [batch]: 0 where b follows a, 1 where b is random."""

    words: Tensor
    segments: Tensor
    attention: Tensor
    labels: Tensor
    random: Tensor

    def __len__(self) -> int:
        return len(self.words)

    def to(self, device: torch.device) -> PairBatch:
        fields = (self.words, self.segments, self.attention, self.labels, self.random)
        return PairBatch(*(field.to(device) for field in fields))


class Pairs:
    """One sample per passage. Its split, its second part and its masked words are a function of the seed, the
    epoch and the sample.
    """

    def __init__(self, pieces: WordPieces, documents: Sequence[Sequence[str]], where: str, seed: int = 0) -> None:
        self.pieces = pieces
        self.seed = seed
        encoded = [[s for s in map(pieces.encode, document) if s] for document in documents]
        self.passages = [p for number, sentences in enumerate(encoded) for p in passages(number, sentences)]
        if len(self.passages) < 2:
            raise DataError(
                f"{where}: {len(self.passages)} passages of two or more sentences, expected at least two; put "
                "one sentence on each line and an empty line between documents"
            )
        counts = Counter(passage.document for passage in self.passages)
        self._starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        self._counts = counts

    def __len__(self) -> int:
        return len(self.passages)

    def batch(self, epoch: int, samples: Sequence[int]) -> PairBatch:
        rows = [self._sample(epoch, sample) for sample in samples]
        return PairBatch(*(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)))

    def _sample(self, epoch: int, sample: int) -> tuple[NDArray[np.int64], ...]:
        random = np.random.default_rng([self.seed, epoch, sample])
        a, b, is_random = self._pair(random, sample)
        number = self.pieces.numbers
        pair = [number[CLASS], *a, number[SEPARATOR], *b, number[SEPARATOR]]
        words = np.full((LENGTH,), number[PAD], dtype=np.int64)
        words[: len(pair)] = pair
        places = np.arange(LENGTH)
        attention = places < len(pair)
        segments = attention & (places >= len(a) + 2)
        maskable = places[(places > 0) & (places < len(pair) - 1) & (places != len(a) + 1)]
        labels = self._mask(random, words, maskable)
        return (
            words,
            segments.astype(np.int64),
            attention.astype(np.int64),
            labels,
            np.asarray(is_random, np.int64),
        )

    def _pair(self, random: np.random.Generator, sample: int) -> tuple[Sentence, Sentence, bool]:
        sentences = self.passages[sample].sentences
        cut = int(random.integers(1, len(sentences)))
        is_random = bool(random.random() < 0.5)
        second = sentences[cut:]
        if is_random:
            other = self._random_passage(random, sample)
            second = other[int(random.integers(1, len(other))) :]
        return (*truncate_pair(sum(sentences[:cut], ()), sum(second, ())), is_random)

    def _random_passage(self, random: np.random.Generator, sample: int) -> tuple[Sentence, ...]:
        """Draw a passage of another document, or another passage if there is only one document."""
        document = self.passages[sample].document
        first, count = self._starts[document], self._counts[document]
        if count == len(self.passages):
            first, count = sample, 1
        at = int(random.integers(len(self.passages) - count))
        return self.passages[at if at < first else at + count].sentences

    def _mask(
        self, random: np.random.Generator, words: NDArray[np.int64], maskable: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Mask 15 % of the words in place (80 % [MASK], 10 % random, 10 % unchanged); returns the labels."""
        labels = np.full((LENGTH,), IGNORED, dtype=np.int64)
        count = max(1, round(MASKED * len(maskable)))
        chosen = random.choice(maskable, count, replace=False)
        labels[chosen] = words[chosen]
        fate = random.random(count)
        anything = random.choice(self.pieces.ordinary, count)
        words[chosen] = np.where(
            fate < REPLACED_BY_MASK,
            self.pieces.numbers[MASK],
            np.where(fate < REPLACED_BY_MASK + REPLACED_BY_ANY, anything, words[chosen]),
        )
        return labels


def truncate_pair(a: Sentence, b: Sentence, room: int = _ROOM) -> tuple[Sentence, Sentence]:
    """Truncate both so that they fit together; a short one leaves its room to the other.

    >>> truncate_pair((1, 2, 3, 4), (5, 6, 7), room=4), truncate_pair((1,), (2, 3, 4, 5), room=4)
    (((1, 2), (5, 6)), ((1,), (2, 3, 4)))
    """
    a = a[: max(room - len(b), room // 2)]
    return a, b[: room - len(a)]
