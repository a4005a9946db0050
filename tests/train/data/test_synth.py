"""The embedded speech: who says what, that it can be told apart, and its cache."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from oktopk.train.data.speech import synthetic
from oktopk.train.data.speech.audio import to_float
from oktopk.train.data.speech.features import features
from oktopk.train.data.speech.labels import encode
from oktopk.train.data.speech.synthetic import Corpus, Speaker, embedded_speech, generate, speak


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return generate()


@pytest.fixture(scope="module")
def small() -> Corpus:
    return generate(5, 3)


def same(a: Corpus, b: Corpus) -> bool:
    clips = list(zip(a.train + a.val, b.train + b.val, strict=True))
    return len(a.train) == len(b.train) and all(
        (x.name, x.speaker, x.text) == (y.name, y.speaker, y.text) and np.array_equal(x.samples, y.samples)
        for x, y in clips
    )


def test_how_much_there_is(corpus: Corpus) -> None:
    assert (len(corpus.train), len(corpus.val)) == (512, 64)
    assert len({clip.name for clip in corpus.train + corpus.val}) == 576
    seconds = [len(clip.samples) / 16_000 for clip in corpus.train + corpus.val]
    assert 0.3 < min(seconds) < max(seconds) < 6


def test_validation_has_its_own_speakers_and_phrases(corpus: Corpus) -> None:
    assert not {clip.speaker for clip in corpus.train} & {clip.speaker for clip in corpus.val}
    assert not {clip.text for clip in corpus.train} & {clip.text for clip in corpus.val}
    assert len({clip.text for clip in corpus.val}) == 64
    assert len({clip.speaker for clip in corpus.train}) == 32
    assert len({clip.speaker for clip in corpus.val}) == 8


def test_every_letter_is_said_often_enough_to_be_learned(corpus: Corpus) -> None:
    said = "".join(clip.text for clip in corpus.train)
    assert min(said.count(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ") >= 20
    assert all(encode(clip.text) for clip in corpus.train + corpus.val)
    assert {"YES", "NO", "GO"} <= {clip.text for clip in corpus.train}


def test_nothing_clips_and_nothing_is_silent(corpus: Corpus) -> None:
    for clip in corpus.train + corpus.val:
        assert clip.samples.dtype == np.int16
        assert 5000 < int(np.abs(clip.samples.astype(int)).max()) < 32767


def test_it_is_always_the_same(corpus: Corpus, small: Corpus) -> None:
    assert same(Corpus(corpus.train[:5], corpus.val[:3]), small)


def test_letters_of_unheard_speakers_are_told_apart_by_their_spectra() -> None:
    """The nearest mean spectrum of 8 training speakers names the letter of 4 others."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

    def spectrum(letter: str, number: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        made = features(to_float(speak(letter, Speaker.number(number), np.random.default_rng(number))))
        loud = made[:, made.mean(dim=0) > made.mean(dim=0).quantile(0.8)]
        return loud.mean(dim=1).numpy()  # type: ignore[no-any-return]

    means = np.stack([np.mean([spectrum(letter, n) for n in range(8)], axis=0) for letter in letters])
    right = 0
    for number in range(32, 36):
        for letter in letters:
            distance = np.linalg.norm(means - spectrum(letter, number), axis=1)
            right += letters[int(np.argmin(distance))] == letter
    assert right >= 0.8 * 4 * 26  # chance is 1 in 26


def test_the_cache_is_written_once_and_then_read(
    tmp_path: Path, small: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(synthetic, "generate", lambda: small)
    assert same(embedded_speech(), small)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["embedded-speech-v1.bin"]

    def never() -> Corpus:
        raise AssertionError("the cache should have been read")

    monkeypatch.setattr(synthetic, "generate", never)
    assert same(embedded_speech(), small)


def test_without_the_variable_the_cache_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OKTOPK_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert synthetic.cache_folder() == tmp_path / ".cache" / "oktopk"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "other"])
def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, small: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setattr(synthetic, "generate", lambda: small)
    embedded_speech(tmp_path)
    path = tmp_path / "embedded-speech-v1.bin"
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "cut": good[:middle],
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "empty": b"",
            "text": b"hello",
            "other": synthetic.hashlib.sha256(b"hello").digest() + b"hello",
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert same(embedded_speech(tmp_path), small)
    assert "generating speech again" in caplog.text
    assert same(synthetic._unpack(path.read_bytes()), small)


def test_a_cache_that_cannot_be_written_is_said_and_survived(
    tmp_path: Path, small: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(synthetic, "generate", lambda: small)
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert same(embedded_speech(tmp_path / "file"), small)
    assert "could not cache" in caplog.text
