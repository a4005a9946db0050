"""The task shared by all image workloads: classification, with top-1 accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ..data.images.dataset import ImageBatch, ImageSet, Scale
from ..data.shard import Sharding, validation_batches
from .base import DataSource, Shard, Tally, Task


@dataclass(frozen=True)
class ImageData:
    train: ImageSet
    val: ImageSet
    scale: Scale

    def describe(self, source: DataSource) -> str:
        where = "generated" if source.folder is None else f"of {source.folder}"
        return f"{len(self.train):,} + {len(self.val):,} images, {where}"


class ImageTask(Task[ImageBatch]):
    metric = "val acc"

    def __init__(
        self, network: Callable[[], nn.Module], images: ImageData, source: DataSource, share: Shard
    ) -> None:
        self.images = images
        self.share = share
        self.augment = source.augment
        self.embedded = source.folder is None
        self.data = images.describe(source)
        self.problems = (*images.train.problems, *images.val.problems)
        self._sharding = Sharding(
            len(images.train), share.world, share.rank, share.batch, share.nsteps, share.seed
        )
        self.steps_per_epoch = self._sharding.steps
        self.model = network()  # last, because it takes longest: bad batch sizes fail before

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[ImageBatch]:
        for indices in self._sharding.batches(epoch, first_step):
            yield self.images.train.batch(indices, epoch if self.augment else None)

    def loss(self, batch: ImageBatch) -> Tensor:
        logits, labels = self._forward(batch)
        return F.cross_entropy(logits, labels)

    def validate(self) -> Tally:
        tally = Tally()
        share, val = self.share, self.images.val
        for indices in validation_batches(len(val), share.world, share.rank, share.batch):
            logits, labels = self._forward(val.batch(indices))
            tally.add(
                loss=F.cross_entropy(logits, labels, reduction="sum").item(),
                correct=float((logits.argmax(1) == labels).sum().item()),
                samples=len(labels),
            )
        return tally

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        samples = sums.get("samples", 0.0)
        if samples == 0:
            return {}
        return {"val loss": sums["loss"] / samples, "val acc": sums["correct"] / samples}

    def _forward(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Logits and labels, on the model's device."""
        there = batch.to(next(self.model.parameters()).device)
        return self.model(self.images.scale(there.images)), there.labels
