"""The data set and its batches."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from oktopk.train.data.problems import DataError
from oktopk.train.data.shard import Sharding
from oktopk.train.data.speech.audio import write_samples
from oktopk.train.data.speech.augment import Augment
from oktopk.train.data.speech.dataset import SpeechDataset, collate
from oktopk.train.data.speech.features import features
from oktopk.train.data.speech.labels import decode
from oktopk.train.data.speech.manifest import write_manifest
from oktopk.train.data.speech.synthetic import Corpus, generate


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return generate(12, 4)


def write(corpus: Corpus, folder: Path) -> Path:
    """The corpus as wav files, transcripts and a manifest."""
    pairs = []
    for clip in corpus.train:
        wav, txt = folder / "wav" / f"{clip.name}.wav", folder / "txt" / f"{clip.name}.txt"
        write_samples(wav, clip.samples)
        txt.parent.mkdir(exist_ok=True)
        txt.write_text(clip.text.lower() + "\n")
        pairs.append((wav, txt))
    write_manifest(folder / "m.csv", pairs)
    return folder / "m.csv"


def test_files_and_memory_give_the_same(tmp_path: Path, corpus: Corpus) -> None:
    files = SpeechDataset.from_manifest(write(corpus, tmp_path))
    memory = SpeechDataset.embedded("train", corpus=corpus)
    assert len(files) == len(memory) == 12
    assert files.seconds == memory.seconds
    for one, other in zip(map(files.__getitem__, range(12)), map(memory.__getitem__, range(12)), strict=True):
        assert torch.equal(one.features, other.features)
        assert torch.equal(one.targets, other.targets)
        assert one.text == other.text == decode(one.targets.tolist())


def test_a_batch_holds_its_items_and_zeros(corpus: Corpus) -> None:
    data = SpeechDataset.embedded("train", corpus=corpus)
    items = [data[i] for i in (3, 0, 7)]
    batch = collate(items)
    longest = max(item.features.shape[1] for item in items)
    assert batch.features.shape == (3, 1, 161, longest)
    assert batch.targets.dtype == batch.lengths.dtype == batch.target_lengths.dtype == torch.int64
    targets = batch.targets.split(batch.target_lengths.tolist())
    for row, length, target, text, item in zip(
        batch.features, batch.lengths.tolist(), targets, batch.texts, items, strict=True
    ):
        assert torch.equal(row[0, :, :length], item.features)
        assert not row[0, :, length:].any()
        assert torch.equal(target, item.targets)
        assert text == item.text


def test_a_batch_goes_through_ctc(corpus: Corpus) -> None:
    data = SpeechDataset.embedded("val", corpus=corpus)
    batch = collate([data[i] for i in range(4)])
    scores = torch.zeros(batch.features.shape[-1] // 2, 4, 29).log_softmax(dim=-1)
    loss = torch.nn.functional.ctc_loss(scores, batch.targets, batch.lengths // 2, batch.target_lengths)
    assert bool(loss.isfinite())  # every utterance is long enough for its letters


def test_augmentation_depends_on_seed_epoch_and_recording_only(corpus: Corpus) -> None:
    def heard(seed: int, epoch: int, order: list[int]) -> dict[int, torch.Tensor]:
        data = SpeechDataset.embedded("train", Augment(), seed, corpus)
        data.set_epoch(epoch)
        return {index: data[index].features for index in order}

    first = heard(1, 2, [0, 1, 2])
    again = heard(1, 2, [2, 0])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[2], again[2])
    for other in (heard(1, 3, [0]), heard(2, 2, [0])):
        assert other[0].shape != first[0].shape or not torch.equal(other[0], first[0])


def test_validation_hears_what_was_recorded(corpus: Corpus) -> None:
    data = SpeechDataset.embedded("val", corpus=corpus)
    sound = torch.from_numpy(corpus.val[0].samples.astype(np.float32) / 32768)
    assert torch.equal(data[0].features, features(sound))


def test_shards_of_a_data_set_make_batches(corpus: Corpus) -> None:
    data = SpeechDataset.embedded("train", corpus=corpus)
    texts: list[str] = []
    for rank in range(2):
        shard = Sharding(len(data), 2, rank, 3, lengths=data.seconds)
        for indices in shard.batches(epoch=0):
            texts += collate([data[i] for i in indices]).texts
    assert sorted(texts) == sorted(clip.text for clip in corpus.train)


def test_bad_recordings_are_listed_and_the_rest_is_kept(
    tmp_path: Path, corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(corpus, tmp_path)
    names = [clip.name for clip in corpus.train]
    (tmp_path / "wav" / f"{names[0]}.wav").write_text("not a sound\n" * 20)
    (tmp_path / "txt" / f"{names[1]}.txt").write_text("ROOM 5")
    (tmp_path / "wav" / f"{names[2]}.wav").unlink()
    with caplog.at_level(logging.WARNING):
        data = SpeechDataset.from_manifest(path)
    assert len(data) == 9
    assert sorted(problem.line or 0 for problem in data.problems) == [1, 2, 3]
    for words in ("text, not sound", f"{names[1]}.txt: unknown characters '5'", "No such file"):
        assert words in caplog.text


def test_samples_that_are_no_numbers_are_found_before_training(tmp_path: Path, corpus: Corpus) -> None:
    """The head of a file of floats does not tell: it would end the run in the middle of an epoch."""
    path = write(corpus, tmp_path)
    broken = tmp_path / "wav" / f"{corpus.train[4].name}.wav"
    sound = corpus.train[4].samples / 32768.0
    sound[100] = np.nan
    soundfile.write(broken, sound, 16_000, subtype="FLOAT")
    data = SpeechDataset.from_manifest(path)
    assert (len(data), [problem.line for problem in data.problems]) == (11, [5])
    assert data.find_unreadable() == []
    soundfile.write(broken, np.zeros(10), 16_000)
    whole = SpeechDataset.from_manifest(path)
    broken.unlink()
    assert [problem.where for problem in whole.find_unreadable()] == [str(broken)]


def test_no_usable_recording_is_an_error(tmp_path: Path, corpus: Corpus) -> None:
    path = write(Corpus(corpus.train[:1], ()), tmp_path)
    next((tmp_path / "txt").iterdir()).write_text("5")
    with pytest.raises(DataError, match=r"(?s)no usable utterances.*m\.csv:1: .*unknown characters '5'"):
        SpeechDataset.from_manifest(path)
    with pytest.raises(DataError, match="no utterances"):
        SpeechDataset([])
