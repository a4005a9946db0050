"""lstman4 as a task: figures of a validation over ranks, its loss, utterances that do not fit, and bad input."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.train.data.problems import DataError
from oktopk.train.data.speech import dataset as speech_data
from oktopk.train.data.speech.audio import SAMPLE_RATE, write_samples
from oktopk.train.data.speech.augment import Augment
from oktopk.train.data.speech.dataset import Recording, SpeechDataset, collate
from oktopk.train.data.speech.features import features
from oktopk.train.data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST, write_manifest
from oktopk.train.data.speech.synthetic import Corpus, generate
from oktopk.train.models.lstman4 import SpeechLSTM, Widths
from oktopk.train.tasks import DataSource, Shard, Tally
from oktopk.train.tasks.lstman4 import SpeechTask, build_speech_task, count_errors, steps_needed

jiwer = pytest.importorskip("jiwer", reason="counts word errors")
soundfile = pytest.importorskip("soundfile", reason="reads and writes sound files")


def tiny() -> SpeechLSTM:
    torch.manual_seed(3)
    return SpeechLSTM(Widths(1, 8, 1)).eval()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return generate(train=12, val=7)


def task(corpus: Corpus, model: nn.Module | None = None, **share: int) -> SpeechTask:
    train, val = (SpeechDataset.embedded(split, corpus=corpus) for split in ("train", "val"))
    return SpeechTask(model or tiny(), train, val, DataSource(), Shard(**{"batch": 2, **share}))  # type: ignore[arg-type]


class Told(nn.Module):
    """Hears what it is told to, by the number of frames of the recording."""

    def __init__(self, heard: Mapping[int, str]) -> None:
        super().__init__()
        self.heard = heard
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.zeros(spectrograms.shape[-1], len(lengths), 29)
        for column, length in enumerate(lengths.tolist()):
            letters = self.heard[length]
            for step in range(scores.shape[0]):
                letter = letters[step // 2] if step % 2 == 0 and step // 2 < len(letters) else "_"
                scores[step, column, "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ ".index(letter)] = 5.0
        return scores.log_softmax(dim=-1), lengths


def validated(made: Callable[[int], SpeechTask], world: int) -> tuple[dict[str, float], list[Tally]]:
    """As the loop does it: sums over ranks, then figures."""
    with torch.no_grad():
        tallies = [made(rank).validate() for rank in range(world)]
    total = Tally()
    for tally in tallies:
        total.add(**tally.sums)
    return made(0).metrics(total.sums), tallies


HEARD = ("", "GO", "YES NO MAYBE A B C D E F G", "ENTER SIX", "", "A B", "ERASE X")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_item_14_word_and_letter_error_rates_are_those_of_jiwer(corpus: Corpus, world: int, batch: int) -> None:
    said = [clip.text for clip in corpus.val]
    lengths = [len(clip.samples) // 160 + 1 for clip in corpus.val]
    assert len(set(lengths)) == 7
    model = Told(dict(zip(lengths, HEARD, strict=True)))
    figures, _ = validated(lambda rank: task(corpus, model, rank=rank, world=world, batch=batch), world)
    assert figures["val WER"] == pytest.approx(jiwer.wer(said, list(HEARD)))
    assert figures["val CER"] == pytest.approx(jiwer.cer(said, list(HEARD)))
    assert figures["empty transcripts"] == pytest.approx(2 / 7)
    assert list(figures) == ["val loss", "val WER", "val CER", "empty transcripts"]
    assert not any("acc" in name for name in figures)


def test_item_14_all_right_is_0_and_too_much_is_above_1(corpus: Corpus) -> None:
    lengths = [len(clip.samples) // 160 + 1 for clip in corpus.val]
    right = Told({length: clip.text for length, clip in zip(lengths, corpus.val, strict=True)})
    assert validated(lambda rank: task(corpus, right), 1)[0]["val WER"] == 0.0
    counts = count_errors(("GO",), ["A B C"])
    assert counts == {"word_errors": 3, "words": 1, "letter_errors": 5, "letters": 2, "empty": 0}
    assert task(corpus).metrics({**counts, "loss": 1.0, "samples": 1.0})["val WER"] == 3.0


def test_item_14_a_rate_of_nothing_is_left_out(corpus: Corpus) -> None:
    assert task(corpus).metrics({}) == {}
    assert task(corpus).metrics({"loss": 4.0, "samples": 2.0, "empty": 0.0}) == {
        "val loss": 2.0,
        "empty transcripts": 0.0,
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_item_12_the_loss_is_ctc_of_log_probabilities(corpus: Corpus, world: int) -> None:
    model, val = tiny(), SpeechDataset.embedded("val", corpus=corpus)
    losses = []
    with torch.no_grad():
        for index in range(len(val)):
            batch = collate([val[index]])
            scores, steps = model(batch.features, batch.lengths)
            assert torch.allclose(scores.exp().sum(dim=-1), torch.ones(()), atol=1e-5)
            one = F.ctc_loss(scores, batch.targets, steps, batch.target_lengths, blank=0, reduction="sum")
            losses.append(float(one))
    figures, tallies = validated(lambda rank: task(corpus, model, rank=rank, world=world), world)
    assert figures["val loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)
    assert sum(tally.sums["samples"] for tally in tallies) == 7


def test_item_12_the_loss_of_a_batch_is_the_mean_over_its_samples(corpus: Corpus) -> None:
    made = task(corpus)
    batch = next(made.batches(epoch=0))
    loss = made.loss(batch)
    scores, steps = made.model(batch.features, batch.lengths)
    each = F.ctc_loss(scores, batch.targets, steps, batch.target_lengths, blank=0, reduction="none")
    assert torch.allclose(loss, each.mean(), rtol=1e-5)
    assert made.samples(batch) == len(batch.texts) == 2
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(bool(p.grad.isfinite().all()) for p in made.model.parameters() if p.grad is not None)


def test_item_14_two_transcripts_are_shown(corpus: Corpus) -> None:
    _, tallies = validated(lambda rank: task(corpus, rank=rank, world=2), 2)
    said = {clip.text for clip in corpus.val}
    for tally in tallies:
        assert len(tally.shown) == 2
        for line in tally.shown:
            assert line.startswith('said "')
            assert line.split('"')[1] in said
            assert ", heard " in line


def test_item_17b_batches_of_ranks_do_not_overlap_and_go_on_anywhere(corpus: Corpus) -> None:
    tasks = [task(corpus, rank=rank, world=2, batch=2, nsteps=1) for rank in range(2)]
    assert tasks[0].steps_per_epoch == 12 // 4
    heard = [[batch.texts for batch in made.batches(epoch=1)] for made in tasks]
    texts = [text for batches in heard for batch in batches for text in batch]
    assert sorted(texts) == sorted(clip.text for clip in corpus.train)
    assert [batch.texts for batch in tasks[0].batches(epoch=1, first_step=2)] == heard[0][2:]


def test_what_the_data_is_in_words(corpus: Corpus) -> None:
    made = task(corpus)
    assert made.embedded
    assert made.data.startswith("12 training utterances, 7 for validation (generated speech")
    assert (made.metric, made.problems) == ("val WER", ())


# from a folder


@pytest.fixture
def folder(tmp_path: Path, corpus: Corpus) -> Path:
    """Five utterances to train with and one to validate with, as files."""
    data = tmp_path / "audio_data"
    for name, clips in ((TRAIN_MANIFEST, corpus.train[:5]), (VAL_MANIFEST, corpus.val[:1])):
        pairs = []
        for clip in clips:
            wav, txt = data / "wav" / f"{clip.name}.wav", data / "txt" / f"{clip.name}.txt"
            txt.parent.mkdir(parents=True, exist_ok=True)
            write_samples(wav, clip.samples)
            txt.write_text(clip.text.lower())
            pairs.append((wav, txt))
        write_manifest(data / name, pairs)
    return data


def made_from(folder: Path, **options: Any) -> SpeechTask:
    return build_speech_task(tiny, DataSource(folder, **options), Shard(batch=1))


def test_item_18_a_folder_with_manifests(folder: Path) -> None:
    made = made_from(folder)
    assert not made.embedded
    assert made.data == f"5 training utterances, 1 for validation ({folder})"
    assert made.train.augment == Augment()
    assert made.val.augment is None
    assert made_from(folder, augment=False).train.augment is None


def test_without_a_folder_speech_is_embedded(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_data, "embedded_speech", lambda cache: corpus)
    made = build_speech_task(tiny, DataSource(), Shard(batch=1, seed=5))
    assert made.embedded
    assert (len(made.train), len(made.val), made.train.seed) == (12, 7, 5)


def test_min_seconds_leaves_out_shorter_training_utterances_only(folder: Path) -> None:
    seconds = sorted(made_from(folder).train.seconds)
    made = made_from(folder, min_seconds=seconds[2])
    assert sorted(made.train.seconds) == seconds[2:]
    assert made.problems == ()
    assert len(made.val) == 1
    with pytest.raises(DataError, match=r"no utterances left: all 5 .*--min-seconds 1000"):
        made_from(folder, min_seconds=1000.0)


def a_recording(text: str, samples: int) -> Recording:
    return Recording(f"{text}.wav", text, samples / SAMPLE_RATE, lambda: torch.randn(samples))


@pytest.mark.parametrize(("text", "steps"), [("AB", 2), ("AA", 3), ("AAA", 5), ("HELLO", 6), ("A A", 3)])
def test_a_letter_needs_a_step_and_a_repeated_one_a_step_before_it(text: str, steps: int) -> None:
    assert steps_needed(a_recording(text, 100)) == steps
    scores = torch.zeros(steps, 1, 29).log_softmax(dim=-1)
    targets = collate([speech_data.SpeechDataset([a_recording(text, 400)])[0]]).targets
    for length, fits in ((steps, True), (steps - 1, False)):
        loss = F.ctc_loss(scores, targets, torch.tensor([length]), torch.tensor([len(text)]), blank=0)
        assert bool(loss.isfinite()) == fits


def shorten(folder: Path, index: int, samples: int) -> str:
    wav = sorted((folder / "wav").glob("*.wav"))[index]
    write_samples(wav, (1000 * np.random.default_rng(0).standard_normal(samples)).astype(np.int16))
    wav.parent.parent.joinpath("txt", f"{wav.stem}.txt").write_text("ABCDEFGHIJ")
    return str(wav)


def test_item_12_utterances_too_short_at_the_fastest_tempo_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten letters need ten steps, so 19 frames, so 18 · 160 samples: at tempo 1.15, those of 3312."""
    name = shorten(folder, 0, 3000)
    fits = 18 * 160 * 115 // 100 + 1
    with caplog.at_level(logging.WARNING):
        made = made_from(folder)
    assert [str(problem) for problem in made.problems] == [f"{name}: too short for its transcript"]
    assert name in caplog.text
    assert name not in [recording.name for recording in made.train.recordings]
    assert len(made_from(folder, augment=False).train) == 5  # as it was spoken, it fits
    shorten(folder, 0, fits)
    assert len(made_from(folder).train) == 5
    fastest = tiny().output_lengths(torch.tensor(features(torch.randn(round(fits / 1.15))).shape[1]))
    assert int(fastest) >= 10


def test_every_training_utterance_has_a_finite_loss_at_any_tempo(folder: Path) -> None:
    shorten(folder, 0, 18 * 160 * 115 // 100 + 1)
    made = made_from(folder)
    made.train.augment = Augment(tempo=(1.15, 1.15))
    losses = [float(made.loss(batch).detach()) for batch in made.batches(0)]
    assert len(losses) == 5
    assert np.isfinite(losses).all()


# bad input


def empty(folder: Path) -> None:
    (folder / VAL_MANIFEST).write_text("\n")


def text_for_sound(folder: Path) -> None:
    for wav in (folder / "wav").iterdir():
        wav.write_text("not a sound\n" * 5)


def wrong_rate(folder: Path) -> None:
    for wav in (folder / "wav").iterdir():
        soundfile.write(str(wav), np.zeros(8000), 8000, subtype="PCM_16")


def unknown_characters(folder: Path) -> None:
    for txt in (folder / "txt").iterdir():
        txt.write_text("room 5")


BAD_INPUT: tuple[tuple[Callable[[Path], object], str], ...] = (
    (shutil.rmtree, r"audio_data: no such folder; without --data-dir"),
    (
        lambda folder: (folder / TRAIN_MANIFEST).unlink(),
        rf"audio_data: no {TRAIN_MANIFEST} found; .*oktopk data an4",
    ),
    (lambda folder: (folder / VAL_MANIFEST).unlink(), rf"audio_data: no {VAL_MANIFEST} found"),
    (empty, rf"{VAL_MANIFEST}: the manifest is empty"),
    (text_for_sound, r"(?s)no usable utterances.*\.wav: .*text, not sound"),
    (wrong_rate, r"(?s)no usable utterances.*\.wav: 8000 Hz instead of 16000"),
    (unknown_characters, r"(?s)no usable utterances.*\.txt: unknown characters '5'"),
    (lambda folder: shutil.rmtree(folder / "wav"), r"(?s)none of the 5 lines can be used.*\.wav: No such file"),
)


@pytest.mark.parametrize(("spoil", "words"), BAD_INPUT)
def test_item_18_bad_input_is_named(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(folder)
    with pytest.raises(DataError, match=words):
        made_from(folder)


def test_item_18_one_bad_file_costs_one_utterance(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim = Path(made_from(folder).train.recordings[2].name)
    victim.write_text("not a sound\n" * 20)
    with caplog.at_level(logging.WARNING):
        made = made_from(folder)
    assert len(made.train) == 4
    assert str(victim) in str(made.problems[0])
    assert str(victim) in caplog.text
