"""Tasks with images: shares, resumed epochs, validation over ranks, and a step of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oktopk.train.data.images.cifar import SCALE, write_cifar
from oktopk.train.data.images.dataset import ImageBatch, InMemoryImages
from oktopk.train.data.images.synthetic import embedded_images
from oktopk.train.data.problems import DataError
from oktopk.train.models.imagenet import alexnet, resnet50
from oktopk.train.tasks import WORKLOADS, DataSource, Shard, StepPosition, imagenet
from oktopk.train.tasks._images import ImageData, ImageTask

TRAIN, VAL = 50, 31
VAL_IMAGES = embedded_images("val", VAL, 32)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classifier = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(images.flatten(1))
        return logits


def small_task(source: DataSource | None = None, **share: int) -> ImageTask:
    """Every pixel of image i in training is i: what a batch holds can be seen in it."""
    numbered = np.broadcast_to(np.arange(TRAIN, dtype=np.uint8)[:, None, None, None], (TRAIN, 3, 32, 32)).copy()
    train = InMemoryImages(numbered, np.arange(TRAIN) % 10, seed=share.get("seed", 0))
    images = ImageData(train, VAL_IMAGES, SCALE)
    return ImageTask(Linear, images, source or DataSource(), Shard(**({"batch": 4} | share)))


def seen(batch: ImageBatch) -> list[int]:
    return batch.images.amax((1, 2, 3)).tolist()


def equal(one: list[ImageBatch], other: list[ImageBatch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("first_step", [0, 1, 3])
def test_a_resumed_epoch_goes_on_with_the_same_batches(first_step: int) -> None:
    whole = list(small_task(nsteps=2).batches(epoch=2))
    resumed = list(small_task(nsteps=2).batches(epoch=2, first_step=first_step))
    assert equal(resumed, whole[2 * first_step :])
    assert len(whole) == 2 * small_task(nsteps=2).steps_per_epoch


def test_epochs_and_seeds_differ_and_augmentation_can_be_off() -> None:
    first = list(small_task().batches(epoch=0))
    assert not equal(first, list(small_task().batches(epoch=1)))
    assert not equal(first, list(small_task(seed=1).batches(epoch=0)))
    plain = list(small_task(DataSource(augment=False)).batches(epoch=0))
    assert [seen(batch) for batch in plain] == [seen(batch) for batch in first]
    assert not equal(first, plain)
    assert all((batch.images == batch.images[:, :, :1, :1]).all() for batch in plain)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_an_epoch_without_overlap(world: int) -> None:
    shares = [
        [n for batch in small_task(rank=r, world=world).batches(0) for n in seen(batch)] for r in range(world)
    ]
    taken = [number for share in shares for number in share]
    assert len(taken) == len(set(taken)) == TRAIN // (4 * world) * 4 * world
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize("world", [3, 40])
def test_tallies_of_ranks_add_up_to_that_of_one(world: int) -> None:
    with torch.no_grad():
        alone = small_task().validate()
        sums = dict.fromkeys(alone.sums, 0.0)
        for rank in range(world):
            for name, amount in small_task(rank=rank, world=world, batch=1).validate().sums.items():
                sums[name] += amount
    assert sums == pytest.approx(alone.sums, rel=1e-5)
    assert sums["samples"] == VAL


def test_figures_are_those_of_all_samples_at_once() -> None:
    task = small_task()
    with torch.no_grad():
        figures = task.metrics(task.validate().sums)
        every = task.images.val.batch(range(VAL))
        guesses = task.model(SCALE(every.images)).argmax(1)
        assert list(figures) == ["val loss", "val acc"]
        assert figures["val loss"] == pytest.approx(task.loss(every).item(), rel=1e-5)
    assert figures["val acc"] == pytest.approx((guesses == every.labels).float().mean().item())
    assert task.metric in figures
    assert task.metrics({}) == {}


def test_one_step_on_embedded_images_is_finite() -> None:
    torch.manual_seed(0)
    task = WORKLOADS["resnet20"].build(DataSource(), Shard(batch=2))
    assert task.embedded
    batch = next(task.batches(epoch=0))
    assert task.samples(batch) == 2
    loss = task.loss(batch)
    loss.backward()
    assert loss.isfinite()
    gradients = [parameter.grad for parameter in task.model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("network", [alexnet, resnet50])
def test_large_networks_take_the_embedded_images_on_their_device(network: Callable[[], nn.Module]) -> None:
    """The device that computes shapes only: quick, and the batches must be brought there."""

    def shapes() -> nn.Module:
        with torch.device("meta"):
            return network()

    task = imagenet.build(shapes, DataSource(), Shard(batch=2))
    loss = task.loss(next(task.batches(epoch=0)))
    assert (loss.shape, loss.device.type) == ((), "meta")


def test_embedded_images_are_learned() -> None:
    """A linear layer in one pass over the embedded images of CIFAR's size."""
    task = WORKLOADS["resnet20"].build(DataSource(augment=False), Shard(batch=32))
    task.model = Linear()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.001)
    for batch in task.batches(epoch=0):
        optimizer.zero_grad()
        task.loss(batch).backward()
        optimizer.step()
    with torch.no_grad():
        figures = task.metrics(task.validate().sums)
    assert figures["val acc"] > 0.7
    assert figures["val loss"] < 1.9


def test_cifar_comes_from_a_folder(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(40) % 10
    write_cifar(tmp_path, images, labels, images[:7], labels[:7])
    task = WORKLOADS["resnet20"].build(DataSource(tmp_path), Shard(batch=8))
    assert (task.steps_per_epoch, task.embedded) == (5, False)
    assert task.data == f"40 + 7 images, of {tmp_path}"


def test_imagenet_comes_from_a_folder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="writes image files")
    for name in ("train/a/1.png", "train/b/1.png", "val/b/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        image.new("RGB", (30, 40)).save(tmp_path / name)
    (tmp_path / "train" / "c").mkdir()
    task = imagenet.build(Linear, DataSource(tmp_path), Shard(batch=2))
    assert next(task.batches(0)).images.shape == (2, 3, 224, 224)
    assert [str(problem) for problem in task.problems] == [f"{tmp_path / 'train' / 'c'}: no images of this class"]
    for number in range(1000):
        (tmp_path / "train" / f"more{number}").mkdir()
    with pytest.raises(DataError, match="1003 classes, but the networks have 1000 outputs"):
        imagenet.build(Linear, DataSource(tmp_path), Shard(batch=2))


def test_a_batch_beyond_the_embedded_images_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"128 samples do not fill one step of 1 ranks × batch 256.*smaller batch"):
        WORKLOADS["alexnet"].build(DataSource(), Shard(batch=WORKLOADS["alexnet"].batch_size))


@pytest.mark.parametrize(
    ("dnn", "dataset", "batch_size", "max_epochs", "tenths"),
    [
        ("vgg16", "cifar10", 16, 161, (81, 122, 155)),
        ("resnet20", "cifar10", 16, 141, (81, 122, 155)),
        ("resnet56", "cifar10", 16, 161, (81, 122, 155)),
        ("resnet110", "cifar10", 16, 161, (81, 122, 155)),
        ("resnet50", "imagenet", 64, 95, (30, 60, 80)),
        ("alexnet", "imagenet", 256, 95, (30, 60, 80)),
    ],
)
def test_defaults_are_the_original_s(
    dnn: str, dataset: str, batch_size: int, max_epochs: int, tenths: tuple[int, ...]
) -> None:
    workload = WORKLOADS[dnn]
    assert (workload.dataset, workload.batch_size, workload.max_epochs) == (dataset, batch_size, max_epochs)
    assert (workload.momentum, workload.weight_decay, workload.clip) == (0.9, 1e-4, None)
    rates = [workload.schedule(1.0, StepPosition(e, 10 * e, 10, 1610, world=4)) for e in range(max_epochs)]
    drops = [e for e in range(1, max_epochs) if rates[e] < rates[e - 1]]
    assert tuple(drops) == tuple(epoch for epoch in tenths if epoch < max_epochs)
    assert rates[0] == (0.25 if dataset == "cifar10" else 1.0)
