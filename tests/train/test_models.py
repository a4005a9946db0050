"""The networks: their sizes, shapes and gradients; speech does not depend on padding; text carries its state."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.train.models.bert import bert_base, bert_tiny
from oktopk.train.models.cifar import Block, ResNet, resnet20, resnet56, resnet110, vgg16
from oktopk.train.models.gpt import GPT, GPT2, GPT_SMALL, GPTModel, Size
from oktopk.train.models.imagenet import alexnet, resnet50
from oktopk.train.models.lstman4 import Lookahead, SpeechLSTM, Widths, lstman4, lstman4_small
from oktopk.train.models.ptb import lstm, lstm_small
from oktopk.utils.extras import install_command


def _gpt(size: Size, tokens: int, vocabulary: int | None = None) -> GPTModel:
    return GPTModel(size, vocabulary or tokens)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "lstman4": lstman4,
    "lstman4-small": lstman4_small,
    "lstm": lstm,
    "lstm-small": lstm_small,
    "vgg16": vgg16,
    "resnet20": resnet20,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "resnet50": resnet50,
    "alexnet": alexnet,
    "bert-base": bert_base,
    "bert-tiny": bert_tiny,
    "gpt": partial(_gpt, GPT, 65),
    "gpt-small": partial(_gpt, GPT_SMALL, 65),
    "gpt2": partial(_gpt, GPT2, 50_257),
}
PARAMETERS = {
    "lstman4": 27_569_568,
    "lstman4-small": 1_048_084,
    "lstm": 66_034_000,
    "lstm-small": 4_653_200,
    "vgg16": 14_728_266,
    "resnet20": 269_722,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet50": 25_557_032,
    "alexnet": 61_100_840,
    "bert-base": 110_106_428,
    "bert-tiny": 4_433_468,
    "gpt": 4_788_480,
    "gpt-small": 3_200_768,
    "gpt2": 124_439_808,
}
IMAGE_SIZES = {"resnet50": 64, "alexnet": 64}  # the rest: 32


def tiny_loss(model: nn.Module, name: str, device: str = "cpu") -> tuple[Tensor, list[tuple[int, ...]]]:
    """The loss of two samples, and the shapes of the outputs; every model with 29 labels, words or classes."""
    if name.startswith("lstman4"):
        log_probabilities, steps = model(torch.randn(2, 1, 161, 37), torch.tensor([37, 30]))
        loss = F.ctc_loss(log_probabilities, torch.tensor([[3, 5], [4, 4]]), steps, torch.tensor([2, 2]))
        return loss, [tuple(log_probabilities.shape), tuple(steps.shape)]
    words = torch.randint(29, (6, 2), device=device)
    if name.startswith("bert"):
        text = words.t().contiguous()
        out = model(input_ids=text, labels=text, next_sentence_label=text[:, 0] % 2)
        return out.loss, [tuple(out.prediction_logits.shape), tuple(out.seq_relationship_logits.shape)]
    if name.startswith("gpt"):
        text = words.t().contiguous()
        logits = model(text)
        return F.cross_entropy(logits.flatten(0, 1), text.flatten()), [tuple(logits.shape)]
    if name.startswith("lstm"):
        logits, state = model(words)
        return F.cross_entropy(logits.flatten(0, 1), words.flatten()), [tuple(logits.shape), tuple(state[0].shape)]
    size = IMAGE_SIZES.get(name, 32)
    logits = model(torch.randn(2, 3, size, size))
    return F.cross_entropy(logits, torch.tensor([3, 5])), [tuple(logits.shape)]


SHAPES = {
    "lstman4": [(19, 2, 29), (2,)],
    "lstman4-small": [(19, 2, 29), (2,)],
    "lstm": [(6, 2, 29), (2, 2, 1500)],
    "lstm-small": [(6, 2, 29), (2, 2, 200)],
    "bert-base": [(2, 6, 29), (2, 2)],
    "bert-tiny": [(2, 6, 29), (2, 2)],
    "gpt": [(2, 6, 29)],
    "gpt-small": [(2, 6, 29)],
    "gpt2": [(2, 6, 29)],
}
LARGE = {"lstm", "bert-base", "gpt2"}  # the code of lstm-small, bert-tiny and gpt, only wider: tested there


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LARGE))
def test_shapes_and_finite_gradients(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name](29)
    loss, shapes = tiny_loss(model, name)
    assert shapes == SHAPES.get(name, [(2, 29)])
    loss.backward()
    assert loss.isfinite()
    for where, parameter in model.named_parameters():
        assert parameter.grad is not None, where
        assert parameter.grad.isfinite().all(), where
        # Biases before a normalisation have no effect; a whole matrix without gradient is not connected.
        assert parameter.ndim == 1 or parameter.grad.any(), where


@pytest.mark.parametrize("name", sorted(LARGE))
def test_shapes_of_the_large_models(name: str) -> None:
    with torch.device("meta"):
        loss, shapes = tiny_loss(MODELS[name](29), name, "meta")
    assert shapes == SHAPES[name]
    assert loss.shape == ()


@pytest.mark.parametrize("name", ["lstman4-small", "lstm-small", "resnet20", "vgg16", "resnet50", "bert-tiny"])
def test_the_seed_decides_the_first_weights(name: str) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(MODELS[name](10).parameters()).detach()

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


# --- lstman4 ---


@pytest.fixture
def speech() -> SpeechLSTM:
    """The small model in eval mode, with statistics that are not those of a fresh normalisation."""
    torch.manual_seed(5)
    model = lstman4_small()
    with torch.no_grad():
        for _ in range(3):
            model(2 + 3 * torch.randn(4, 1, 161, 50), torch.tensor([50, 40, 33, 21]))
    return model.eval()


def test_the_layers_of_lstman4() -> None:
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in lstman4().parameters() if p.ndim > 1]
    first, others = [(3200, 1312), (3200, 800)], [(3200, 800)] * 8
    assert shapes == [(32, 1, 41, 11), (32, 32, 21, 11), *first, *others, (800, 1, 21), (29, 800)]


@pytest.mark.parametrize(
    ("junk", "dtype", "rounding"),
    [
        (0.0, torch.float64, 1e-9),  # strict: what leaks through five fresh LSTM layers is small
        (math.nan, torch.float64, 1e-9),
        (math.inf, torch.float32, 1e-4),  # the kernels that training uses
    ],
)
def test_a_sample_does_not_see_the_padding_of_its_batch(
    speech: SpeechLSTM, junk: float, dtype: torch.dtype, rounding: float
) -> None:
    speech.to(dtype)
    lengths = torch.tensor([27, 61, 1, 44])
    batch = torch.full((4, 1, 161, 70), junk, dtype=dtype)
    for sample, length in zip(batch, lengths.tolist(), strict=True):
        sample[..., :length] = torch.randn(1, 161, length, dtype=dtype)
    with torch.no_grad():
        together, steps = speech(batch, lengths)
        assert together.shape == (35, 4, 29)
        assert steps.tolist() == [14, 31, 1, 22]
        for number, length in enumerate(lengths.tolist()):
            alone, _ = speech(batch[number : number + 1, ..., :length], lengths[number : number + 1])
            assert len(alone) == steps[number]
            torch.testing.assert_close(together[: len(alone), number], alone[:, 0], rtol=0, atol=rounding)


def test_every_frame_of_a_sample_counts(speech: SpeechLSTM) -> None:
    """The mask does not cut off too much: the last frame moves the output, the one behind it does not."""
    x, lengths = torch.randn(1, 1, 161, 40), torch.tensor([37])
    with torch.no_grad():
        before, steps = speech(x, lengths)
        for frame, matters in ((0, True), (36, True), (37, False)):
            changed = x.clone()
            changed[..., frame] += 5
            after, _ = speech(changed, lengths)
            assert torch.equal(after[:steps], before[:steps]) != matters, frame


def test_training_does_not_depend_on_how_far_a_batch_is_padded() -> None:
    """Gradients and running statistics too: the normalisation counts real frames only."""
    x = torch.randn(3, 1, 161, 45, dtype=torch.float64)  # where rounding is far below any real difference
    lengths = torch.tensor([45, 20, 31])

    def trained(padding: int) -> dict[str, Tensor]:
        torch.manual_seed(7)
        model = SpeechLSTM(Widths(channels=4, hidden=16)).double()
        out, steps = model(F.pad(x, (0, padding), value=9.0), lengths)
        F.ctc_loss(out, torch.tensor([[1, 2]] * 3), steps, torch.tensor([2, 2, 2])).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return gradients | dict(model.named_buffers())

    torch.testing.assert_close(trained(0), trained(33), rtol=0, atol=1e-9)


def test_normalisation_is_over_all_real_frames() -> None:
    """One pass with momentum 1 leaves the mean over every step of every sample as the running mean."""
    model = SpeechLSTM(Widths(channels=4, hidden=16))
    inputs: list[Tensor] = []
    for norm in model.lstm_norms:
        assert isinstance(norm, nn.BatchNorm1d)
        norm.momentum = 1.0
        norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    model(torch.randn(2, 1, 161, 30), torch.tensor([30, 11]))
    assert [tuple(x.shape) for x in inputs] == [(15 + 6, 16)] * 4
    for norm, x in zip(model.lstm_norms, inputs, strict=True):
        torch.testing.assert_close(norm.running_mean, x.mean(0))


def test_outputs_are_log_probabilities_and_ctc_sums_over_alignments() -> None:
    torch.manual_seed(2)
    model = SpeechLSTM(Widths(channels=4, hidden=16), labels=4)
    out, steps = model(torch.randn(2, 1, 161, 10), torch.tensor([10, 7]))
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(5, 2))
    targets = torch.tensor([[1, 2], [3, 3]])
    loss = F.ctc_loss(out, targets, steps, torch.tensor([2, 2]), reduction="none")
    normalised = F.ctc_loss(F.log_softmax(out, -1), targets, steps, torch.tensor([2, 2]), reduction="none")
    torch.testing.assert_close(loss, normalised)
    for sample in range(2):
        expected = -alignments(out[: steps[sample], sample], targets[sample].tolist()).logsumexp(0)
        torch.testing.assert_close(loss[sample], expected)


def alignments(log_probabilities: Tensor, target: list[int]) -> Tensor:
    """The log-probability of every path of labels that says the target: repeats merged, blanks dropped."""
    steps, labels = log_probabilities.shape
    paths = itertools.product(range(labels), repeat=steps)
    fitting = [p for p in paths if [label for label, _ in itertools.groupby(p) if label] == target]
    return torch.stack([log_probabilities[range(steps), path].sum() for path in fitting])


def test_the_small_lstman4_learns_a_batch_by_heart() -> None:
    torch.manual_seed(3)
    model = lstman4_small()
    x, lengths, targets = torch.randn(2, 1, 161, 24), torch.tensor([24, 20]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    losses = []
    for _ in range(40):
        out, steps = model(x, lengths)
        loss = F.ctc_loss(out, targets, steps, torch.tensor([3, 3]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0], losses


def test_lookahead_sums_the_steps_that_follow() -> None:
    layer, x = Lookahead(3, context=2), torch.randn(5, 2, 3)
    weight = layer.convolution.weight[:, 0]  # [units, context + 1]
    expected = torch.zeros(5, 2, 3)
    for step, ahead in itertools.product(range(5), range(3)):
        if step + ahead < 5:
            expected[step] += weight[:, ahead] * x[step + ahead]
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((2, 161, 30), [30, 30], r"\[batch, 1, 161, time\], got \[2, 161, 30\]"),
        ((2, 1, 160, 30), [30, 30], "161"),
        ((2, 1, 161, 30), [30], "lengths must have shape \\[2\\]"),
        ((2, 1, 161, 30), [30, 31], r"between 1 and 30 frames, got \[30, 31\]"),
        ((2, 1, 161, 30), [0, 30], "between 1"),
        ((0, 1, 161, 30), [], "between 1"),
    ],
)
def test_wrong_speech_input_is_named(shape: tuple[int, ...], lengths: list[int], message: str) -> None:
    model = SpeechLSTM(Widths(channels=2, hidden=4))
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(shape), torch.tensor(lengths, dtype=torch.long))


# --- text and images ---


def test_the_state_joins_windows_and_carries_no_gradient() -> None:
    torch.manual_seed(4)
    model, words = lstm_small(50), torch.randint(50, (10, 3))
    whole, _ = model(words)
    first, state = model(words[:5])
    second, _ = model(words[5:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    assert not torch.allclose(model(words[5:])[0], second)
    assert not any(part.requires_grad for part in state)


def test_only_the_large_lstm_drops() -> None:
    with torch.device("meta"):
        model = MODELS["lstm"]()
    assert model.lstm.dropout == model.dropout.p == 0.65
    assert MODELS["lstm-small"](9).dropout.p == 0


@pytest.mark.parametrize(("before", "width"), [(4, 4), (4, 8)])
def test_a_shortcut_has_no_parameters(before: int, width: int) -> None:
    """With the residual at zero a block gives its input: every second pixel, new channels zero (option A)."""
    block, x = Block(before, width), torch.rand(2, before, 8, 8)
    nn.init.zeros_(block.residual[-1].weight)
    out = block(x)
    stride = width // before
    assert torch.equal(out[:, :before], x[:, :, ::stride, ::stride])
    assert out.shape[1] == width
    assert not out[:, before:].any()


def test_a_depth_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="depth must be 6n \\+ 2 with n of at least 1, got 21"):
        ResNet(21, 10)


def test_the_loss_of_bert_has_both_parts() -> None:
    torch.manual_seed(6)
    model, words = bert_tiny(50).eval(), torch.randint(50, (3, 7))
    follows = torch.tensor([0, 1, 1])
    out = model(input_ids=words, labels=words, next_sentence_label=follows)
    masked = F.cross_entropy(out.prediction_logits.flatten(0, 1), words.flatten())
    torch.testing.assert_close(out.loss, masked + F.cross_entropy(out.seq_relationship_logits, follows))


@pytest.mark.parametrize("factory", [MODELS["bert-base"], bert_tiny])
def test_bert_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, factory: Callable[[], nn.Module]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=re.escape(install_command("train"))):
        factory()


# --- gpt ---


def test_a_token_of_gpt_does_not_see_those_after_it() -> None:
    torch.manual_seed(0)
    model, tokens = GPTModel(GPT_SMALL, 29).eval(), torch.randint(29, (1, 12))
    other = tokens.clone()
    other[0, 7] = (other[0, 7] + 1) % 29
    with torch.no_grad():
        before, after = model(tokens), model(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
