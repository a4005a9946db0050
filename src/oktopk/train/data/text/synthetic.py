"""Generated text, so that the trainer runs without a download: documents in an invented language.

It has structure that a language model can learn: Zipf word frequencies, nouns that prefer certain verbs and
adjectives, verbs that agree with a distant subject, and documents with one topic. All words but the function words
are invented.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

Document = tuple[str, ...]
"""Sentences."""

TRAIN_WORDS, VALID_WORDS = 60_000, 6_000
_SEED = 7
_TOPICS, _NOUNS, _VERBS, _ADJECTIVES = 12, 32, 14, 12
_FAVOURITES = 3
_ONSETS, _VOWELS, _CODAS = "bdfgklmnprstvz", "aeiou", "lmnrtk"
_DETERMINERS = (("the", "a", "this", "every", "one"), ("the", "some", "these", "many", "two", "few"))
_COPULAS, _PRONOUNS = ("is", "are"), ("it", "they")
_PLACES, _JOINERS = ("in", "near", "with", "behind", "under"), ("and", "but", "because", "while")


@dataclass(frozen=True)
class Prose:
    train: tuple[Document, ...]
    valid: tuple[Document, ...]


@cache
def embedded_prose() -> Prose:
    """Generate the text; it is always the same, and takes less than a second."""
    return Prose(_write_documents(0, TRAIN_WORDS), _write_documents(1, VALID_WORDS))


def _write_documents(split: int, words: int) -> tuple[Document, ...]:
    """Write documents until they have this many words."""
    writer = _Writer(np.random.default_rng([_SEED, 1, split]))
    documents: list[Document] = []
    while words > 0:
        documents.append(tuple(" ".join(sentence) for sentence in writer.document()))
        words -= sum(len(sentence.split()) for sentence in documents[-1])
    return tuple(documents)


@dataclass(frozen=True)
class _Topic:
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    adjectives: tuple[str, ...]


@cache
def _topics() -> tuple[_Topic, ...]:
    """Make the vocabulary; the ending of a word tells its part of speech, so that no word has two."""
    random = np.random.default_rng([_SEED, 0])
    nouns = _stems(random, _TOPICS * _NOUNS, _CODAS)
    verbs = _stems(random, _TOPICS * _VERBS, ("ke", "ve", "de"))
    adjectives = _stems(random, _TOPICS * _ADJECTIVES, ("ny", "ly", "sty"))
    return tuple(_Topic(nouns[i::_TOPICS], verbs[i::_TOPICS], adjectives[i::_TOPICS]) for i in range(_TOPICS))


def _stems(random: np.random.Generator, count: int, endings: Sequence[str]) -> tuple[str, ...]:
    stems = [
        first + vowel + second + other + ending
        for first in _ONSETS
        for vowel in _VOWELS
        for second in _ONSETS
        for other in _VOWELS
        for ending in endings
    ]
    return tuple(stems[int(i)] for i in random.permutation(len(stems))[:count])


@cache
def _zipf(count: int) -> tuple[float, ...]:
    """Cumulative Zipf probabilities of `count` items."""
    weights = [1 / (rank + 1) for rank in range(count)]
    return tuple(total / sum(weights) for total in accumulate(weights))


class _Writer:
    """Writes sentences; number 0 is singular, 1 plural."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.topic = _topics()[0]

    def document(self) -> Iterator[list[str]]:
        """Write 8 to 23 sentences on one topic. Some continue with a pronoun for the previous subject."""
        self.topic = _topics()[int(self.random.integers(_TOPICS))]
        noun, number = self._rank(_NOUNS), self._number()
        for sentence in range(int(self.random.integers(8, 24))):
            if sentence and self._happens(0.25):
                yield [_PRONOUNS[number], *self._predicate(noun, number)]
                continue
            noun, number = self._rank(_NOUNS), self._number()
            yield [*self._subject(noun, number), *self._predicate(noun, number)]

    def _subject(self, noun: int, number: int) -> list[str]:
        """Write a subject, sometimes with a second noun between the first and its verb, as a distractor."""
        words = self._noun_phrase(noun, number)
        if self._happens(0.2):
            words += ["of", *self._noun_phrase(self._favourite(noun, _NOUNS), self._number())]
        return words

    def _predicate(self, noun: int, number: int) -> list[str]:
        if self._happens(0.2):
            words = [_COPULAS[number], self.topic.adjectives[self._favourite(noun, _ADJECTIVES)]]
        else:
            verb = self._favourite(noun, _VERBS)
            form = self.topic.verbs[verb] + ("s" if number == 0 else "")
            words = [form, *self._noun_phrase(self._favourite(verb, _NOUNS), self._number())]
        if self._happens(0.25):
            words += [self._one_of(_PLACES), *self._noun_phrase(self._rank(_NOUNS), self._number())]
        if self._happens(0.15):
            words += [self._one_of(_JOINERS), _PRONOUNS[number], *self._predicate(noun, number)]
        return words

    def _noun_phrase(self, noun: int, number: int) -> list[str]:
        words = [self._one_of(_DETERMINERS[number])]
        if self._happens(0.35):
            words.append(self.topic.adjectives[self._favourite(noun, _ADJECTIVES)])
        return [*words, self.topic.nouns[noun] + ("s" if number == 1 else "")]

    def _favourite(self, of: int, count: int) -> int:
        """Choose mostly one of the few words that go with the given one, else any."""
        if self._happens(0.8):
            return (of * 5 + self._rank(_FAVOURITES)) % count
        return self._rank(count)

    def _rank(self, count: int) -> int:
        return bisect(_zipf(count)[:-1], self.random.random())

    def _one_of(self, words: Sequence[str]) -> str:
        return words[self._rank(len(words))]

    def _number(self) -> int:
        return int(self._happens(0.4))

    def _happens(self, probability: float) -> bool:
        return bool(self.random.random() < probability)
