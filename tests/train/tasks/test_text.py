"""The workloads of text: state that is carried on, sums of a validation over ranks, and one step of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.train.data.problems import DataError
from oktopk.train.data.text.ptb import STRETCH, read_text
from oktopk.train.models.bert import bert_tiny
from oktopk.train.models.gpt import Size as GPTSize
from oktopk.train.models.ptb import Size, WordLSTM
from oktopk.train.tasks import WORKLOADS, DataSource, Shard, StepPosition, Tally, Task
from oktopk.train.tasks.bert import BertTask
from oktopk.train.tasks.gpt import GPTTask
from oktopk.train.tasks.lstm import LanguageModelTask

NARROW = Size(units=8, dropout=0.0, start=0.5)


@pytest.fixture(scope="module")
def ptb(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    """Training of 3000 words, validation of a bit more than three stretches, which training has not in full."""
    folder = tmp_path_factory.mktemp("ptb")
    (folder / "train.txt").write_text("one two three four\nfive two\n" * 375, encoding="utf-8")
    (folder / "valid.txt").write_text("one five two nine\n" * (3 * STRETCH // 5 + 20), encoding="utf-8")
    return DataSource(folder)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    """16 passages for training, 7 for validation."""
    folder = tmp_path_factory.mktemp("text")
    for name, count in (("train", 16), ("valid", 7)):
        text = "".join(f"the cat {i} sat\nit saw a dog {i}\nand ran\n\n" for i in range(count))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return DataSource(folder)


def words(source: DataSource, **share: int) -> LanguageModelTask:
    torch.manual_seed(1)
    return LanguageModelTask(partial(WordLSTM, NARROW), source, Shard(**{"batch": 4, **share}))


def masked(source: DataSource, **share: int) -> BertTask:
    torch.manual_seed(1)
    return BertTask(bert_tiny, source, Shard(**{"batch": 2, **share}))


def validated(task: Task[Any]) -> Tally:
    task.model.eval()
    with torch.no_grad():
        return task.validate()


def losses(task: Task[Any], batches: Iterator[Any], lr: float = 0.5) -> list[float]:
    """Of a training on the batches."""
    found = []
    for batch in batches:
        loss = task.loss(batch)
        task.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in task.model.parameters():
                assert parameter.grad is not None
                parameter -= lr * parameter.grad
        found.append(loss.item())
    return found


def with_model_of(task: Task[Any], other: Task[Any]) -> None:
    other.model.load_state_dict(task.model.state_dict())


# --- lstm ---


def test_going_on_in_mid_epoch_is_bit_identical(ptb: DataSource) -> None:
    task, resumed = words(ptb, nsteps=2), words(ptb, nsteps=2)
    assert task.steps_per_epoch == 10
    losses(task, islice(task.batches(1), 6))
    resumed.model.load_state_dict(task.model.state_dict())
    resumed.load_state_dict(task.state_dict())
    rest = losses(task, task.batches(1, first_step=3))
    assert len(rest) == 14
    assert losses(resumed, resumed.batches(1, first_step=3)) == rest
    assert all(torch.equal(resumed.state_dict()[name], part) for name, part in task.state_dict().items())


def test_the_saved_state_matters(ptb: DataSource) -> None:
    task, forgetful = words(ptb), words(ptb)
    losses(task, islice(task.batches(0), 3))
    forgetful.model.load_state_dict(task.model.state_dict())
    first = [next(t.batches(0, first_step=3)) for t in (task, forgetful)]
    assert task.loss(first[0]).item() != forgetful.loss(first[1]).item()


def test_windows_with_a_carried_state_are_one_long_text(ptb: DataSource) -> None:
    """The mean of the windows' losses is the loss of their words in one go."""
    task = words(ptb)
    windows = list(islice(task.batches(0), 5))
    logits, _ = task.model(torch.cat([window.words for window in windows]))
    whole = F.cross_entropy(logits.flatten(0, 1), torch.cat([window.targets for window in windows]).flatten())
    parts = [task.loss(window) for window in windows]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_an_epoch_begins_with_zeros_whatever_was_before(ptb: DataSource) -> None:
    task = words(ptb)
    fresh = task.loss(next(task.batches(0))).item()
    for window in task.batches(1):
        task.loss(window)
    assert task.loss(next(task.batches(0))).item() == fresh


def test_validation_and_training_do_not_share_a_state(ptb: DataSource) -> None:
    task = words(ptb)
    fresh = validated(task).sums
    assert task.state_dict() == {}
    for window in islice(task.batches(0), 2):
        task.loss(window)
    before = task.state_dict()
    assert validated(task).sums == fresh
    assert all(torch.equal(task.state_dict()[name], part) for name, part in before.items())


def test_a_state_that_is_not_finite_is_forgotten(ptb: DataSource) -> None:
    """As after a step that was skipped: the weights are good again, and so must be the next loss."""
    task = words(ptb)
    windows = task.batches(0)
    good = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    task.loss(next(windows))
    with torch.no_grad():
        next(task.model.parameters()).fill_(math.nan)
    assert task.loss(next(windows)).isnan()
    assert task.state_dict() == {}
    task.model.load_state_dict(good)
    third = next(windows)
    logits, _ = task.model(third.words)
    assert task.loss(third).item() == F.cross_entropy(logits.flatten(0, 1), third.targets.flatten()).item()


def test_a_state_of_another_batch_size_is_refused(ptb: DataSource) -> None:
    task, other = words(ptb), words(ptb, batch=5)
    task.loss(next(task.batches(0)))
    with pytest.raises(DataError, match=r"shape \(2, 4, 8\), expected \(2, 5, 8\)"):
        other.load_state_dict(task.state_dict())


def test_no_state_is_a_state_too(ptb: DataSource) -> None:
    task = words(ptb)
    task.loss(next(task.batches(0)))
    task.load_state_dict(words(ptb).state_dict())
    assert task.state_dict() == {}


@pytest.mark.parametrize("world", [2, 3, 5])
def test_word_losses_add_up_over_ranks(ptb: DataSource, world: int) -> None:
    """The stretches are the same whoever reads them; a fifth rank has none."""
    one = validated(words(ptb)).sums
    shares = [validated(words(ptb, rank=rank, world=world, batch=2)).sums for rank in range(world)]
    assert one["samples"] == 3 * STRETCH + 100 == sum(share["samples"] for share in shares)
    assert sum(share["loss"] for share in shares) == pytest.approx(one["loss"], rel=1e-5)


def test_a_validation_is_nearly_that_of_the_text_in_one_go(ptb: DataSource) -> None:
    task = words(ptb)
    assert ptb.folder is not None
    text = read_text(ptb.folder)
    shifted = torch.cat([text.vocabulary.encode(["<eos>"]), text.valid[:-1]])
    with torch.no_grad():
        logits, _ = task.model(shifted[:, None])
    whole = F.cross_entropy(logits[:, 0], text.valid).item()
    assert task.metrics(validated(task).sums)["val loss"] == pytest.approx(whole, rel=1e-4)


def test_perplexity_is_the_exponential_of_the_mean_loss(ptb: DataSource) -> None:
    task = words(ptb)
    figures = task.metrics({"loss": 12.0, "samples": 4.0})
    assert list(figures) == ["val loss", task.metric]
    assert figures == {"val loss": 3.0, "val perplexity": pytest.approx(math.exp(3))}
    assert task.metrics({"loss": 1e4, "samples": 1.0})["val perplexity"] == math.inf
    assert task.metrics({"loss": 0.0, "samples": 0.0}) == {}


def test_words_say_what_they_are(ptb: DataSource) -> None:
    task = words(ptb)
    assert task.data == f"3,000 + 2,200 words, 7 different, of {ptb.folder}"
    assert not task.embedded
    assert task.samples(next(task.batches(0))) == 4
    assert isinstance(task.model, WordLSTM)
    assert task.model.output.out_features == 7


# --- BERT ---


@pytest.fixture(scope="module")
def bert(documents: DataSource) -> BertTask:
    return masked(documents)


def test_the_loss_is_that_of_both_heads(bert: BertTask) -> None:
    """And is that of words, segments and attention, each of which matters."""
    bert.model.eval()
    batch = next(bert.batches(0))
    out = bert.model(batch.words, attention_mask=batch.attention, token_type_ids=batch.segments)
    words_loss = F.cross_entropy(out.prediction_logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    next_loss = F.cross_entropy(out.seq_relationship_logits, batch.random)
    torch.testing.assert_close(bert.loss(batch), words_loss + next_loss)


@pytest.mark.parametrize("world", [2, 3])
def test_sums_of_pairs_add_up_over_ranks(documents: DataSource, bert: BertTask, world: int) -> None:
    one = validated(bert).sums
    tasks = [masked(documents, rank=rank, world=world, seed=rank) for rank in range(world)]
    for task in tasks:
        with_model_of(bert, task)
    shares = [validated(task).sums for task in tasks]
    assert one["samples"] == 7
    for name, amount in one.items():
        assert sum(share[name] for share in shares) == pytest.approx(amount, rel=1e-4), name


def test_figures_of_pairs(bert: BertTask) -> None:
    sums = {"masked loss": 30.0, "masked": 10.0, "next loss": 2.0, "next right": 3.0, "samples": 4.0, "loss": 32.0}
    assert bert.metrics(sums) == {"val loss": 3.5, "val mlm loss": 3.0, "val nsp acc": 0.75}
    assert next(iter(bert.metrics(sums))) == bert.metric
    assert bert.metrics(dict.fromkeys(sums, 0.0)) == {}


def test_a_validation_gives_every_sum(bert: BertTask) -> None:
    sums = validated(bert).sums
    assert sums["loss"] == pytest.approx(sums["masked loss"] + sums["next loss"])
    assert 0 <= sums["next right"] <= sums["samples"]
    assert sums["masked"] >= sums["samples"]
    assert bert.metrics(sums)["val mlm loss"] == pytest.approx(
        math.log(len(bert.model.cls.predictions.bias)), rel=0.1
    )


def test_pairs_can_be_gone_on_with_at_any_step(documents: DataSource) -> None:
    task = masked(documents, world=2, rank=1, nsteps=2)
    assert task.steps_per_epoch == 2
    whole, rest = list(task.batches(3)), list(task.batches(3, first_step=1))
    assert len(whole) == 4
    assert all(torch.equal(one.words, other.words) for one, other in zip(rest, whole[2:], strict=True))
    assert task.samples(whole[0]) == 2


def test_pairs_say_what_they_are(documents: DataSource, bert: BertTask) -> None:
    assert bert.data == f"16 + 7 passages, 30 word pieces, of {documents.folder}"
    assert not bert.embedded


# --- both ---


@pytest.mark.parametrize(("dnn", "lr"), [("lstm-small", 1.0), ("bert-tiny", 2e-4)])
def test_a_step_on_the_embedded_text(dnn: str, lr: float) -> None:
    """As the loop makes it, with the workload's own optimizer: the loss is finite, and lower afterwards."""
    torch.manual_seed(2)
    workload = WORKLOADS[dnn]
    task = workload.build(DataSource(), Shard(batch=workload.batch_size))
    optimizer = workload.optimizer(task.model.parameters(), lr=lr, weight_decay=workload.weight_decay)
    batch = next(task.batches(0))
    assert task.embedded
    assert task.steps_per_epoch > 50
    loss = task.loss(batch)
    loss.backward()
    assert workload.clip is not None
    assert nn.utils.clip_grad_norm_(task.model.parameters(), workload.clip).isfinite()
    optimizer.step()
    again: Tensor = task.loss(batch)
    assert loss.isfinite()
    assert again < loss


@pytest.mark.parametrize(
    ("dnn", "dataset", "batch", "epochs", "clip", "decay"),
    [
        ("lstm", "ptb", 20, 50, 0.25, 0.0),
        ("lstm-small", "ptb", 20, 50, 0.25, 0.0),
        ("bert-base", "text", 8, 3, 1.0, 0.01),
        ("bert-tiny", "text", 8, 3, 1.0, 0.01),
    ],
)
def test_what_the_original_had(dnn: str, dataset: str, batch: int, epochs: int, clip: float, decay: float) -> None:
    workload = WORKLOADS[dnn]
    assert (workload.dnn, workload.dataset, workload.batch_size) == (dnn, dataset, batch)
    assert (workload.max_epochs, workload.clip) == (epochs, clip)
    assert (workload.momentum, workload.weight_decay) == (None if dataset == "text" else 0.0, decay)


def test_learning_rates() -> None:
    clocks = [
        StepPosition(epoch=epoch, step=epoch, steps_per_epoch=1, total_steps=50, world=2) for epoch in range(50)
    ]
    lstm = [WORKLOADS["lstm"].schedule(1.0, clock) for clock in clocks]
    assert lstm == pytest.approx([1.0] * 25 + [0.1] * 15 + [0.01] * 10)
    bert = [WORKLOADS["bert-base"].schedule(1.0, clock) for clock in clocks]
    assert bert[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert bert[5:] == sorted(bert[5:], reverse=True)


def test_too_little_text_is_said_at_once(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text("a b\nb a\n\na a\nb b\n", encoding="utf-8")
    with pytest.raises(DataError, match="12 words do not fill one step"):
        words(DataSource(tmp_path))
    with pytest.raises(DataError, match="2 samples do not fill one step"):
        masked(DataSource(tmp_path), batch=8)


# --- gpt ---


def windows(source: DataSource, **share: int) -> GPTTask:
    torch.manual_seed(1)
    size = GPTSize(layers=1, width=16, heads=2, context=8, dropout=0.0)
    return GPTTask(size, source, Shard(**{"batch": 4, **share}))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    folder = tmp_path_factory.mktemp("letters")
    (folder / "input.txt").write_text("the quick brown fox jumps over a lazy dog. " * 60, encoding="utf-8")
    return DataSource(folder)


@pytest.mark.parametrize("world", [2, 3])
def test_gpt_validation_over_ranks_is_that_of_one(letters: DataSource, world: int) -> None:
    alone = windows(letters)
    ranks = [windows(letters, world=world, rank=rank) for rank in range(world)]
    sums = [validated(task).sums for task in ranks]
    together = {name: sum(part[name] for part in sums) for name in sums[0]}
    assert alone.metrics(together)["val loss"] == pytest.approx(alone.metrics(validated(alone).sums)["val loss"])


def test_gpt_learns_and_ranks_see_different_windows(letters: DataSource) -> None:
    task = windows(letters)
    found = losses(task, (batch for epoch in range(3) for batch in task.batches(epoch)))
    assert found[-1] < 0.7 * found[0]
    first, second = (next(windows(letters, world=2, rank=rank).batches(0))[0] for rank in (0, 1))
    assert not torch.equal(first, second)


def test_gpt_decays_matrices_only(letters: DataSource) -> None:
    task = windows(letters)
    optimizer = WORKLOADS["gpt"].optimizer(task.model.parameters(), lr=0.1, weight_decay=0.3)
    for group in optimizer.param_groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert held == len(list(task.model.parameters()))


def test_gpt_with_too_little_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("ab" * 40, encoding="utf-8")
    with pytest.raises(DataError, match="too few to validate"):
        windows(DataSource(tmp_path))
