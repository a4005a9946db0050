"""Language modelling with a decoder-only transformer, on characters or token files; the metric is the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from ..data.problems import DataError
from ..data.shard import Sharding, validation_batches
from ..data.text.tokens import Windows, embedded_tokens, read_tokens
from ..models.gpt import GPT, GPT2, GPT_SMALL, GPTModel, Size
from .base import DataSource, Shard, Tally, Task, Workload
from .schedules import constant_after_warmup, cosine_decay

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each [batch, context]."""


class GPTTask(Task[Batch]):
    """Predicts the next token at every position of a window."""

    metric = "val loss"

    def __init__(self, size: Size, source: DataSource, share: Shard) -> None:
        text = embedded_tokens() if source.folder is None else read_tokens(source.folder)
        self._train, self._valid = Windows(text.train, size.context), Windows(text.valid, size.context)
        if not len(self._valid):
            raise DataError(f"{len(text.valid)} {text.kind} are too few to validate on windows of {size.context}")
        self._share = share
        self._sharding = Sharding(len(self._train), share.world, share.rank, share.batch, share.nsteps, share.seed)
        self.model = GPTModel(size, text.vocabulary)
        self.embedded = source.folder is None
        place = "generated text" if source.folder is None else str(source.folder)
        self.data = (
            f"{len(text.train):,} + {len(text.valid):,} {text.kind}, {text.vocabulary:,} different, of {place}"
        )
        self.steps_per_epoch = self._sharding.steps

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        random = np.random.default_rng([self._share.seed, epoch])
        offset = int(random.integers(self._train.context))  # the same on all ranks
        for numbers in self._sharding.batches(epoch, first_step):
            yield self._train.batch(numbers, offset)

    def loss(self, batch: Batch) -> Tensor:
        return self._loss(batch, "mean")

    def samples(self, batch: Batch) -> int:
        return len(batch[0])

    def validate(self) -> Tally:
        tally, share = Tally({"loss": 0.0, "samples": 0.0}), self._share
        for numbers in validation_batches(len(self._valid), share.world, share.rank, max(share.batch, 32)):
            batch = self._valid.batch(numbers)
            tally.add(loss=self._loss(batch, "sum").item(), samples=batch[1].numel())
        return tally

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"val loss": sums["loss"] / sums["samples"]} if sums["samples"] else {}

    def _loss(self, batch: Batch, reduction: str) -> Tensor:
        device = next(self.model.parameters()).device
        tokens, targets = (part.to(device) for part in batch)
        logits: Tensor = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def _adamw(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> AdamW:
    """AdamW as GPTs are trained: only matrices decay, not biases and layer norms."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95))


WORKLOADS = (
    Workload(
        dnn="gpt", dataset="tokens", build=partial(GPTTask, GPT), batch_size=16, max_epochs=12,
        schedule=cosine_decay(0.02, 0.1), optimizer=_adamw, momentum=None, weight_decay=0.1, clip=1.0,
    ),
    Workload(
        dnn="gpt-small", dataset="tokens", build=partial(GPTTask, GPT_SMALL), batch_size=8, max_epochs=2,
        schedule=constant_after_warmup(50), optimizer=_adamw, momentum=None, weight_decay=0.1, clip=1.0,
    ),
    Workload(
        dnn="gpt2", dataset="tokens", build=partial(GPTTask, GPT2), batch_size=4, max_epochs=1,
        schedule=cosine_decay(0.02, 0.1), optimizer=_adamw, momentum=None, weight_decay=0.1, clip=1.0,
    ),
)  # fmt: skip
