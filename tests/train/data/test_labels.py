"""Transcripts to classes and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data.problems import DataError
from oktopk.train.data.speech.labels import BLANK, LABELS, decode, encode, greedy_decode, normalise

words = st.lists(st.text(LABELS[1:-1], min_size=1, max_size=8), min_size=1, max_size=5)


def test_the_labels_of_lstman4() -> None:
    assert len(LABELS) == 29
    assert (LABELS[0], LABELS[1], LABELS[2], LABELS[27], LABELS[28]) == ("_", "'", "A", "Z", " ")


@given(words)
def test_what_was_encoded_is_decoded(said: list[str]) -> None:
    text = " ".join(said)
    classes = encode(text.lower())
    assert decode(classes) == text
    assert BLANK not in classes


@given(words, st.data())
def test_greedy_decoding_undoes_any_alignment(said: list[str], data: st.DataObject) -> None:
    """Every class is held for some frames, with blanks where CTC needs or likes them."""
    text = " ".join(said)
    frames, last = [], BLANK
    for number in encode(text):
        blanks = data.draw(st.integers(1 if number == last else 0, 2))
        frames += [BLANK] * blanks + [number] * data.draw(st.integers(1, 3))
        last = number
    assert greedy_decode(frames) == text


@pytest.mark.parametrize(
    ("frames", "text"),
    [([], ""), ([0, 0], ""), ([2, 2, 2], "A"), ([2, 0, 2], "AA"), ([28, 2, 28, 0, 28, 3, 28], "A B")],
)
def test_greedy_decoding(frames: list[int], text: str) -> None:
    assert greedy_decode(frames) == text


def test_unknown_characters_and_their_file_are_named() -> None:
    with pytest.raises(DataError, match=r"a/b\.txt: unknown characters '5', '_', 'ß'"):
        encode("5 STRAßE_5", "a/b.txt")


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_transcript_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match=r"c\.txt: the transcript is empty"):
        encode(text, "c.txt")


def test_normalise() -> None:
    assert normalise("\n don't  stop\t") == "DON'T STOP"
