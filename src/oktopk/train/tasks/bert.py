"""BERT pre-training: masked words and next sentence prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from ..data.shard import Sharding, validation_batches
from ..data.text.ptb import IGNORED
from ..data.text.sentence_pairs import PairBatch, Pairs, embedded_documents, read_documents
from ..models.bert import bert_base, bert_tiny
from .base import DataSource, Shard, Tally, Task, Workload
from .schedules import linear_decay


class BertTask(Task[PairBatch]):
    """The loss is the sum of the masked-word loss and the next-sentence loss."""

    metric = "val loss"

    def __init__(self, factory: Callable[[int], nn.Module], source: DataSource, share: Shard) -> None:
        documents = embedded_documents() if source.folder is None else read_documents(source.folder)
        place = "generated text" if source.folder is None else str(source.folder)
        self._train = Pairs(documents.pieces, documents.train, f"{place}, training", share.seed)
        # Not the run's seed: all runs are validated on the same masked words.
        self._valid = Pairs(documents.pieces, documents.valid, f"{place}, validation")
        self._share = share
        self._sharding = Sharding(len(self._train), share.world, share.rank, share.batch, share.nsteps, share.seed)
        self.model = factory(len(documents.pieces.pieces))
        self.embedded = source.folder is None
        self.data = (
            f"{len(self._train):,} + {len(self._valid):,} passages, "
            f"{len(documents.pieces.pieces):,} word pieces, of {place}"
        )
        self.steps_per_epoch = self._sharding.steps

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[PairBatch]:
        for samples in self._sharding.batches(epoch, first_step):
            yield self._train.batch(epoch, samples)

    def loss(self, batch: PairBatch) -> Tensor:
        batch = batch.to(self._device)
        loss: Tensor = self._run(batch, labels=batch.labels, next_sentence_label=batch.random).loss
        return loss

    def validate(self) -> Tally:
        tally = Tally(dict.fromkeys(("loss", "samples", "masked loss", "masked", "next loss", "next right"), 0.0))
        share = self._share
        for samples in validation_batches(len(self._valid), share.world, share.rank, share.batch):
            batch = self._valid.batch(0, samples).to(self._device)
            tally.add(**self._sums(batch))
        return tally

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        if not sums["samples"]:
            return {}
        masked = sums["masked loss"] / sums["masked"]
        return {
            "val loss": masked + sums["next loss"] / sums["samples"],
            "val mlm loss": masked,
            "val nsp acc": sums["next right"] / sums["samples"],
        }

    def _sums(self, batch: PairBatch) -> dict[str, float]:
        out = self._run(batch)
        chosen = batch.labels != IGNORED
        masked = F.cross_entropy(out.prediction_logits[chosen], batch.labels[chosen], reduction="sum").item()
        next_logits = out.seq_relationship_logits
        following = F.cross_entropy(next_logits, batch.random, reduction="sum").item()
        return {
            "loss": masked + following,
            "samples": len(batch),
            "masked loss": masked,
            "masked": int(chosen.sum()),
            "next loss": following,
            "next right": int((next_logits.argmax(1) == batch.random).sum()),
        }

    def _run(self, batch: PairBatch, **labels: Tensor) -> Any:
        return self.model(
            input_ids=batch.words, token_type_ids=batch.segments, attention_mask=batch.attention, **labels
        )

    @property
    def _device(self) -> Any:
        return next(self.model.parameters()).device


def _workload(dnn: str, factory: Callable[[int], nn.Module]) -> Workload:
    return Workload(
        dnn=dnn,
        dataset="text",
        build=partial(BertTask, factory),
        batch_size=8,
        max_epochs=3,
        schedule=linear_decay(0.1),
        optimizer=AdamW,
        momentum=None,
        weight_decay=0.01,
        clip=1.0,
    )


WORKLOADS = (_workload("bert-base", bert_base), _workload("bert-tiny", bert_tiny))
