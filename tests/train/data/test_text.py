"""Text: words and sentences from files and embedded, who reads which of them, and what is masked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk.train.data.problems import DataError
from oktopk.train.data.text import ptb, sentence_pairs
from oktopk.train.data.text.ptb import IGNORED, STRETCH, Columns, Stretches, Vocabulary, embedded_text, read_text
from oktopk.train.data.text.sentence_pairs import (
    LENGTH,
    SPECIAL,
    Pairs,
    WordPieces,
    embedded_documents,
    read_documents,
)
from oktopk.train.data.text.synthetic import embedded_prose
from tests.support.paths import DATA

BERT_VOCABULARY = DATA / "bert-base-uncased-vocab.txt"


def write(folder: Path, **texts: str) -> Path:
    """ptb_train="…" becomes ptb.train.txt."""
    for name, text in texts.items():
        (folder / f"{name.replace('_', '.')}.txt").write_text(text, encoding="utf-8")
    return folder


# --- words ---


def test_the_vocabulary_comes_from_the_training_file_alone(tmp_path: Path) -> None:
    text = read_text(write(tmp_path, ptb_train="b a\n a c\n\nb a\n", ptb_valid="a new\n"))
    assert text.vocabulary.words == ("<eos>", "a", "b", "c", "<unk>")
    assert text.train.tolist() == [2, 1, 0, 1, 3, 0, 2, 1, 0]
    assert text.valid.tolist() == [1, 4, 0]


def test_names_without_ptb_are_read_too_but_come_second(tmp_path: Path) -> None:
    write(tmp_path, train="x\n", valid="x x\n")
    assert len(read_text(tmp_path).valid) == 3
    assert len(read_text(write(tmp_path, ptb_valid="x\n")).valid) == 2


def test_rare_words_are_unknown_and_the_limit_counts_all() -> None:
    vocabulary = Vocabulary.of("dccbbba", limit=3)
    assert vocabulary.words == ("b", "c", "<unk>")
    assert vocabulary.encode("abcd").tolist() == [2, 0, 1, 2]


def test_unknown_stands_in_the_text_itself_in_ptb() -> None:
    """A word like any other: it has its place by its frequency, and is not there twice."""
    assert Vocabulary.of(["a", "<unk>", "b", "<unk>", "<unk>", "a"], limit=3).words == ("<unk>", "a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"has no ptb\.train\.txt or train\.txt"),
        (b"", r"ptb\.train\.txt: no words"),
        (b" \n\n", r"ptb\.train\.txt: no words"),
        (b"caf\xe9 x\n", r"ptb\.train\.txt: not UTF-8 at byte 3"),
    ],
)
def test_files_of_words_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    write(tmp_path, ptb_valid="x\n")
    if content is not None:
        (tmp_path / "ptb.train.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text(tmp_path)


@pytest.mark.parametrize("read", [read_text, read_documents])
def test_a_folder_that_is_not_there(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read(tmp_path / "nowhere")


# --- columns ---


def inputs(text: Tensor, epoch: int = 0, world: int = 1, **settings: int) -> list[int]:
    """The words that all ranks together read in an epoch."""
    ranks = [Columns(text, world, rank, window=3, **settings) for rank in range(world)]
    return [int(word) for rank in ranks for window in rank.batches(epoch) for word in window.words.flatten()]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_any_number_of_ranks_reads_the_same_words_once(world: int, epoch: int) -> None:
    """Batch 6 divided by the ranks: the same columns."""
    text = torch.arange(100)
    read = inputs(text, epoch, world, batch=6 // world, seed=3)
    assert len(set(read)) == len(read) == 90
    assert sorted(read) == sorted(inputs(text, epoch, batch=6, seed=3))


@given(
    length=st.integers(6, 200),
    world=st.integers(1, 3),
    batch=st.integers(1, 3),
    nsteps=st.integers(1, 3),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_two_successive_epochs_read_every_word(
    length: int, world: int, batch: int, nsteps: int, seed: int, epoch: int
) -> None:
    text = torch.arange(length)
    if length < 3 * world * batch * nsteps:
        with pytest.raises(DataError, match="do not fill one step"):
            Columns(text, world, 0, batch, nsteps, seed, window=3)
        return
    settings = {"world": world, "batch": batch, "nsteps": nsteps, "seed": seed}
    first, second = inputs(text, epoch, **settings), inputs(text, epoch + 1, **settings)
    assert len(first) == len(set(first)) == len(second)
    assert set(first) | set(second) == set(range(length))


def test_windows_follow_each_other_and_targets_are_the_next_words() -> None:
    """Word = its place in the text, so that each next one is one more."""
    text = torch.arange(100)
    windows = list(Columns(text, world=2, rank=1, batch=2, window=4, seed=1).batches(epoch=2))
    assert len(windows) == 6
    assert [window.first for window in windows] == [True] + [False] * 5
    assert all(len(window) == 2 for window in windows)
    read, targets = (torch.cat(parts) for parts in ([w.words for w in windows], [w.targets for w in windows]))
    assert read.shape == (24, 2)
    assert torch.equal(targets, (read + 1) % 100)
    assert torch.equal(read[1:], targets[:-1])


def test_columns_are_dealt_out_to_the_ranks_in_turn() -> None:
    starts = [
        next(Columns(torch.arange(28), 2, rank, 2, window=3).batches(0)).words[0].tolist() for rank in (0, 1)
    ]
    assert starts == [[0, 12], [6, 18]]


@pytest.mark.parametrize("first_step", range(4))
def test_an_epoch_can_be_gone_on_with_at_any_step(first_step: int) -> None:
    columns = Columns(torch.arange(100), world=1, rank=0, batch=5, nsteps=2, window=3)
    assert columns.steps == 3
    whole, rest = list(columns.batches(1)), list(columns.batches(1, first_step))
    assert len(rest) == 2 * (3 - first_step)
    for window, expected in zip(rest, whole[2 * first_step :], strict=True):
        assert torch.equal(window.words, expected.words)
        assert torch.equal(window.targets, expected.targets)
        assert window.first == expected.first


def test_epochs_differ_by_their_start_and_seeds_by_its_distance() -> None:
    text = torch.arange(1000)
    assert inputs(text, 1, batch=4, seed=1) != inputs(text, 2, batch=4, seed=1)
    assert inputs(text, 1, batch=4, seed=1) != inputs(text, 1, batch=4, seed=2)
    assert inputs(text, 0, batch=4, seed=1) == inputs(text, 0, batch=4, seed=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 2}, "rank must be in 0 … 1, got 2"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"nsteps": 0}, "nsteps must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_columns_that_cannot_be(settings: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Columns(torch.arange(1000), **{"world": 2, "rank": 0, "batch": 2, **settings})


def test_a_step_that_is_not_in_the_epoch() -> None:
    with pytest.raises(DataError, match="step must be in 0 … 10, got 11"):
        next(Columns(torch.arange(350), 1, 0, 1, window=35).batches(0, first_step=11))


@pytest.mark.parametrize("length", [1, STRETCH, STRETCH + 1, 3 * STRETCH + 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_validation_word_counts_once_after_the_words_before_it(length: int, world: int) -> None:
    text, before = 7 + torch.arange(length), 6
    counted: list[int] = []
    for rank in range(world):
        for windows in Stretches(text, before, world, rank, batch=2).batches():
            read = torch.cat([window.words for window in windows])
            targets = torch.cat([window.targets for window in windows])
            counts = targets != IGNORED
            assert torch.equal(read[counts] + 1, targets[counts])
            counted += targets[counts].tolist()
            for column in range(read.shape[1]):
                first = int(counts[:, column].nonzero()[0])
                assert first == (0 if read[0, column] == before else ptb.WINDOW)
    assert sorted(counted) == text.tolist()


# --- the embedded text ---


def test_the_embedded_text_is_of_the_promised_size() -> None:
    text = embedded_text()
    assert 60_000 < len(text.train) < 75_000
    assert 6_000 < len(text.valid) < 7_500
    assert 1_000 < len(text.vocabulary.words) < 2_000
    assert embedded_prose.__wrapped__() == embedded_prose()


def test_the_embedded_text_is_not_its_own_validation() -> None:
    train = {sentence for document in embedded_prose().train for sentence in document if len(sentence.split()) > 8}
    valid = [sentence for document in embedded_prose().valid for sentence in document if len(sentence.split()) > 8]
    assert sum(sentence in train for sentence in valid) < len(valid) / 20


def test_a_word_says_much_about_the_next_one() -> None:
    """The perplexity of pairs of words, counted in training, is far below that of single words."""
    text = embedded_text()
    size = len(text.vocabulary.words)
    single = torch.bincount(text.train, minlength=size) + 0.1
    single /= single.sum()
    pairs = torch.bincount(text.train[:-1] * size + text.train[1:], minlength=size * size).view(size, size)
    following = (pairs + 5 * single) / (pairs.sum(1, keepdim=True) + 5)
    alone = math.exp(-single[text.valid[1:]].log().mean())
    after = math.exp(-following[text.valid[:-1], text.valid[1:]].log().mean())
    assert alone > 150
    assert after < alone / 3


def test_frequencies_fall_as_zipf_has_it() -> None:
    """The tenth word is several times as frequent as the hundredth, and that as the thousandth."""
    counts = sorted(Counter(embedded_text().train.tolist()).values(), reverse=True)
    assert counts[9] > 4 * counts[99] > 16 * counts[999]


def test_documents_keep_to_their_topic() -> None:
    """Two neighbours share more rare words than two sentences of different documents."""
    documents = embedded_prose().train
    frequent = {word for word, _ in Counter(" ".join(s for d in documents for s in d).split()).most_common(40)}

    def share(a: str, b: str) -> bool:
        return bool(set(a.split()) & set(b.split()) - frequent)

    together = sum(share(document[3], document[4]) for document in documents)
    apart = sum(share(one[3], other[4]) for one, other in pairwise(documents))
    assert together > 3 * apart


# --- sentences ---


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    documents = embedded_documents()
    return Pairs(documents.pieces, documents.train, "the embedded text", seed=5)


def unmasked(batch: sentence_pairs.PairBatch) -> Tensor:
    return torch.where(batch.labels == IGNORED, batch.words, batch.labels)


def test_a_sample_is_two_parts_with_their_marks(pairs: Pairs) -> None:
    batch = pairs.batch(0, range(50))
    pad, _, class_, separator, _ = (pairs.pieces.numbers[special] for special in SPECIAL)
    for row, segments, attention in zip(unmasked(batch), batch.segments, batch.attention, strict=True):
        length = int(attention.sum())
        first, last = (row == separator).nonzero().flatten().tolist()
        assert row.shape == (LENGTH,)
        assert row[0] == class_
        assert (row == class_).sum() == 1
        assert 1 < first < last - 1 == length - 2
        assert segments.tolist() == [0] * (first + 1) + [1] * (last - first) + [0] * (LENGTH - length)
        assert attention.tolist() == [1] * length + [0] * (LENGTH - length)
        assert (row[length:] == pad).all()
        assert (row[:length] != pad).all()


def test_masking_rates(pairs: Pairs) -> None:
    """15 % of the words; 80 % of them [MASK], 10 % another word, 10 % the same."""
    batch = pairs.batch(0, range(len(pairs)))
    chosen = batch.labels != IGNORED
    words_in_all = int(batch.attention.sum()) - 3 * len(batch)
    assert int(chosen.sum()) / words_in_all == pytest.approx(0.15, abs=0.005)
    shown, was = batch.words[chosen], batch.labels[chosen]
    mask = shown == pairs.pieces.numbers["[MASK]"]
    assert float(mask.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((shown == was).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert len(set(shown[~mask & (shown != was)].tolist())) > 300  # any word, not only frequent ones
    assert chosen.any(1).all()


def test_marks_are_never_masked_and_never_put_in(pairs: Pairs) -> None:
    batch = pairs.batch(0, range(len(pairs)))
    chosen = batch.labels != IGNORED
    marks = torch.tensor([pairs.pieces.numbers[special] for special in SPECIAL])
    assert not torch.isin(batch.labels[chosen], marks).any()
    assert not torch.isin(batch.words[chosen], marks[:4]).any()
    assert torch.equal(batch.words[~chosen] == marks[4], torch.zeros(int((~chosen).sum()), dtype=torch.bool))


def test_half_of_the_second_parts_follow(pairs: Pairs) -> None:
    """Those that do stand after the first part in the document; those that do not come from another document."""
    batch = pairs.batch(0, range(len(pairs)))
    assert float(batch.random.float().mean()) == pytest.approx(0.5, abs=0.06)
    rows = zip(unmasked(batch), batch.segments, batch.random, pairs.passages, strict=True)
    for row, segments, is_random, passage in islice(rows, 60):
        second = row[segments == 1].tolist()[:-1]
        homes = {other.document for other in pairs.passages if contains(other, second)}
        assert homes
        assert (passage.document in homes) != bool(is_random)


def contains(passage: sentence_pairs.Passage, part: list[int]) -> bool:
    """Whether the words begin with some sentence of the passage and go on as it does."""
    starts = [at for at, sentence in enumerate(passage.sentences) if list(sentence) == part[: len(sentence)]]
    return any(list(chain.from_iterable(passage.sentences[at:]))[: len(part)] == part for at in starts)


def test_a_sample_depends_on_seed_epoch_and_number_alone() -> None:
    documents = embedded_documents()
    one, again, other = (Pairs(documents.pieces, documents.train[:20], "here", seed) for seed in (5, 5, 6))
    expected = one.batch(3, [4, 9])
    assert torch.equal(again.batch(3, [9, 4]).words.flip(0), expected.words)
    assert torch.equal(again.batch(3, [9, 4]).labels.flip(0), expected.labels)
    assert not torch.equal(again.batch(4, [4, 9]).labels, expected.labels)
    assert not torch.equal(other.batch(3, [4, 9]).labels, expected.labels)


@given(st.lists(st.integers(1, 200), max_size=20))
def test_passages_hold_every_sentence_and_two_at_least(lengths: list[int]) -> None:
    document = [(number,) * length for number, length in enumerate(lengths)]
    found = list(sentence_pairs.passages(7, document))
    assert all(len(passage.sentences) >= 2 and passage.document == 7 for passage in found)
    if len(document) > 1:
        assert {s for passage in found for s in passage.sentences} == set(document)
    else:
        assert not found
    assert all(sum(map(len, p.sentences)) <= LENGTH - 3 or len(p.sentences) == 2 for p in found)


def test_long_sentences_are_cut_so_that_both_parts_remain(tmp_path: Path) -> None:
    long = " ".join(["word"] * 300)
    documents = read_documents(write(tmp_path, train=f"{long}\n{long}\n\n{long}\n{long}\n", valid="a\nb\n"))
    batch = Pairs(documents.pieces, documents.train, "here").batch(0, [0, 1])
    assert batch.attention.all()
    assert batch.segments.sum(1).tolist() == [64, 64]


def test_of_one_document_another_passage_is_the_random_one() -> None:
    pieces = WordPieces((*SPECIAL, *"abcd"))
    long = [" ".join([letter] * 60) for letter in "abcd"]
    pairs = Pairs(pieces, [long], "here")
    batch = pairs.batch(0, [0] * 2)
    assert len(pairs) == 2
    rows = [pairs.batch(epoch, [0]) for epoch in range(20)]
    seconds = {(int(row.random), int(unmasked(row)[0, 62])) for row in rows}
    assert seconds == {(0, pieces.numbers["b"]), (1, pieces.numbers["d"])}
    assert len(batch) == 2


# --- word pieces ---


def test_without_a_vocabulary_whole_words_are_the_pieces(tmp_path: Path) -> None:
    documents = read_documents(write(tmp_path, train="The cat.\nA cat!\n", valid="The dog\nA\n"))
    assert documents.pieces.pieces == (*SPECIAL, "cat", "!", ".", "a", "the")
    assert documents.pieces.encode("The dog.") == (9, 1, 7)
    assert documents.pieces.encode("[MASK]") == (1, 1, 1)


def test_a_vocabulary_in_the_folder_is_taken(tmp_path: Path) -> None:
    vocabulary = "\n".join([*SPECIAL, "run", "##ning", "##n"]) + "\n"
    documents = read_documents(write(tmp_path, train="a\nb\n", valid="a\nb\n", vocab=vocabulary))
    assert documents.pieces.encode("running runn runs") == (5, 6, 5, 7, 1)


def test_one_file_is_both_training_and_validation(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    documents = read_documents(write(tmp_path, book="\n".join(lines), vocab="\n".join(SPECIAL)))
    assert [list(documents.train[0]), list(documents.valid[0])] == [lines[:95], lines[95:]]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "found no text file"),
        ({"one": "a\nb\n", "two": "a\nb\n"}, r"found one\.txt, two\.txt"),
        ({"train": "\n", "valid": "a\n"}, r"train\.txt: no words"),
        (
            {"train": "a\nb\n", "valid": "a\n", "vocab": "[PAD]\n[UNK]\na\n"},
            r"vocab\.txt: .*\[CLS\], \[SEP\], \[MASK\]",
        ),
    ],
)
def test_folders_of_sentences_that_cannot_be_used(tmp_path: Path, texts: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_documents(write(tmp_path, **texts))


def test_sentences_without_a_neighbour_make_no_pairs() -> None:
    with pytest.raises(DataError, match="here: 0 passages of two or more sentences"):
        Pairs(WordPieces.of(["a b"]), [["a b"], ["b a"]], "here")


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (write(tmp_path, valid="x\n") / "train.txt").write_bytes(b"ok \xff\n")
    with pytest.raises(DataError, match=r"train\.txt: not UTF-8 at byte 3"):
        read_documents(tmp_path)


@pytest.mark.skipif(not BERT_VOCABULARY.is_file(), reason="needs the vocabulary of BERT in the data folder")
def test_pieces_are_those_of_the_library() -> None:
    """transformers' own tokenizer says the same of the same vocabulary."""
    from transformers import BertTokenizer

    pieces, library = WordPieces.read(BERT_VOCABULARY), BertTokenizer(str(BERT_VOCABULARY))
    assert len(pieces.pieces) == 30_522
    texts = [
        "Émile's naïve_test — “quoted” 5€ x² İstanbul, unbelievably!",
        "hello\x00 wor\u200bld 中文 text\tand\u00a0more",
        "a" * 100 + " " + "a" * 101,
        "Before we proceed any further, hear me speak. ...",
    ]
    for text in texts:
        assert list(pieces.encode(text)) == library.encode(text, add_special_tokens=False)
