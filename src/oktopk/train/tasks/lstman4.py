"""lstman4: speech recognition on AN4 with CTC; the metrics are word and character error rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from ..data.problems import DataError, Problem, format_problems
from ..data.shard import Sharding, validation_batches
from ..data.speech.audio import SAMPLE_RATE
from ..data.speech.augment import Augment
from ..data.speech.dataset import Recording, SpeechBatch, SpeechDataset, collate
from ..data.speech.features import frame_count
from ..data.speech.labels import BLANK, encode, greedy_decode
from ..data.speech.manifest import TRAIN_MANIFEST, VAL_MANIFEST
from ..models.lstman4 import SpeechLSTM, lstman4, lstman4_small
from .base import DataSource, Shard, Tally, Task, Workload
from .schedules import exponential_decay

log = logging.getLogger(__name__)

SHOWN = 2
"""Transcripts to show after a validation."""


class SpeechTask(Task[SpeechBatch]):
    metric = "val WER"

    def __init__(
        self, model: SpeechLSTM, train: SpeechDataset, val: SpeechDataset, source: DataSource, share: Shard
    ) -> None:
        self.model: SpeechLSTM = model
        self.train, self.val = train, val
        self.embedded = source.folder is None
        where = "generated speech, no recordings" if self.embedded else source.folder
        self.data = f"{len(train)} training utterances, {len(val)} for validation ({where})"
        self.problems = (*train.problems, *val.problems)
        sharding = Sharding(
            len(train), share.world, share.rank, share.batch, share.nsteps, share.seed, train.seconds
        )
        self._sharding, self._share = sharding, share
        self.steps_per_epoch = sharding.steps

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[SpeechBatch]:
        self.train.set_epoch(epoch)
        for chosen in self._sharding.batches(epoch, first_step):
            yield collate([self.train[index] for index in chosen])

    def samples(self, batch: SpeechBatch) -> int:
        return len(batch.texts)

    def loss(self, batch: SpeechBatch) -> Tensor:
        return self._total_loss(batch, *self._forward(batch)) / len(batch.texts)

    def validate(self) -> Tally:
        tally, pairs = Tally(), []
        share = self._share
        own = validation_batches(len(self.val), share.world, share.rank, share.batch, self.val.seconds)
        for chosen in own:
            batch = collate([self.val[index] for index in chosen])
            log_probabilities, steps = self._forward(batch)
            loss = self._total_loss(batch, log_probabilities, steps)
            decoded = decode_transcripts(log_probabilities, steps)
            tally.add(loss=float(loss), samples=len(decoded), **count_errors(batch.texts, decoded))
            pairs += [f'said "{said}", heard "{text}"' for said, text in zip(batch.texts, decoded, strict=True)]
        middle, longest = pairs[len(pairs) // 2 :][:1], pairs[::-1]
        tally.shown = [*dict.fromkeys([*middle, *longest])][:SHOWN]
        return tally

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """WER and CER exceed 1 if the model outputs more words than were said."""
        rates = {
            "val loss": ("loss", "samples"),
            "val WER": ("word_errors", "words"),
            "val CER": ("letter_errors", "letters"),
            "empty transcripts": ("empty", "samples"),
        }
        return {name: sums[part] / sums[whole] for name, (part, whole) in rates.items() if sums.get(whole)}

    def _forward(self, batch: SpeechBatch) -> tuple[Tensor, Tensor]:
        device = next(self.model.parameters()).device
        log_probabilities, steps = self.model(batch.features.to(device), batch.lengths.to(device))
        return log_probabilities, steps

    def _total_loss(self, batch: SpeechBatch, log_probabilities: Tensor, steps: Tensor) -> Tensor:
        """CTC of log-probabilities [T', batch, labels], summed over the batch."""
        return F.ctc_loss(
            log_probabilities, batch.targets, steps.cpu(), batch.target_lengths, blank=BLANK, reduction="sum"
        )


def decode_transcripts(log_probabilities: Tensor, steps: Tensor) -> list[str]:
    best = log_probabilities.argmax(dim=-1).t().tolist()  # [batch][T']
    return [greedy_decode(row[:length]) for row, length in zip(best, steps.tolist(), strict=True)]


def count_errors(expected: tuple[str, ...], decoded: list[str]) -> dict[str, float]:
    """Count errors and words; the counts add up over batches and ranks."""
    import jiwer  # imported here: only validation needs it

    words, letters = (
        jiwer.process_words(list(expected), decoded),
        jiwer.process_characters(list(expected), decoded),
    )
    return {
        "word_errors": words.substitutions + words.deletions + words.insertions,
        "words": words.hits + words.substitutions + words.deletions,
        "letter_errors": letters.substitutions + letters.deletions + letters.insertions,
        "letters": letters.hits + letters.substitutions + letters.deletions,
        "empty": sum(not text for text in decoded),
    }


def build_speech_task(model: Callable[[], SpeechLSTM], source: DataSource, share: Shard) -> SpeechTask:
    augment = Augment() if source.augment else None
    if source.folder is None:
        train = SpeechDataset.embedded("train", augment, share.seed)
        val = SpeechDataset.embedded("val")
    else:
        train = SpeechDataset.from_manifest(_manifest(source.folder, TRAIN_MANIFEST), augment, share.seed)
        val = SpeechDataset.from_manifest(_manifest(source.folder, VAL_MANIFEST))
    network = model()
    train, val = _drop_too_short(train, network, source.min_seconds), _drop_too_short(val, network)
    return SpeechTask(network, train, val, source, share)


def _manifest(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; without --data-dir, generated speech is used")
    if not (folder / name).is_file():
        raise DataError(f"{folder}: no {name} found; create it with: oktopk data an4 SRC {folder}")
    return folder / name


def _drop_too_short(data: SpeechDataset, model: SpeechLSTM, min_seconds: float = 0.0) -> SpeechDataset:
    """Drop recordings shorter than min_seconds, or too short for their letters at the fastest tempo."""
    fastest = data.augment.tempo[1] if data.augment else 1.0
    kept, problems = [], list(data.problems)
    for recording in data.recordings:
        if recording.seconds < min_seconds:
            continue
        if steps_needed(recording) > _steps(model, recording.seconds / fastest):
            problems.append(Problem(recording.name, "too short for its transcript"))
        else:
            kept.append(recording)
    if len(problems) > len(data.problems):
        log.warning("left out, too short for CTC:\n%s", format_problems(problems[len(data.problems) :]))
    if not kept:
        why = f"all {len(data)} are too short for --min-seconds {min_seconds:g}, or for their transcripts"
        raise DataError(f"no utterances left: {why}\n{format_problems(problems)}".rstrip())
    return SpeechDataset(kept, problems, data.augment, data.seed)


def steps_needed(recording: Recording) -> int:
    """Steps that CTC needs: one per letter, and one more between two equal letters."""
    classes = encode(recording.text, recording.name)
    return len(classes) + sum(a == b for a, b in pairwise(classes))


def _steps(model: SpeechLSTM, seconds: float) -> int:
    frames = frame_count(int(seconds * SAMPLE_RATE))
    return int(model.output_lengths(torch.tensor(frames)))


def _workload(name: str, network: Callable[[], SpeechLSTM], **rest: Any) -> Workload:
    return Workload(
        dnn=name,
        dataset="an4",
        build=lambda source, share: build_speech_task(network, source, share),
        optimizer=SGD,
        **rest,
    )


WORKLOADS = (
    _workload("lstman4", lstman4, batch_size=2, max_epochs=161, schedule=exponential_decay(1.01), clip=400.0),
    # Runs are short and decay fast, because entries of a sparse run wait about a hundred steps in the residual.
    _workload(
        *("lstman4-small", lstman4_small),
        batch_size=2, max_epochs=16, schedule=exponential_decay(1.12), clip=400.0,
    ),
)  # fmt: skip
