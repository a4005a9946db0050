"""The networks that can be trained, by the names the command line knows them by."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .bert import bert_base, bert_tiny
from .cifar import resnet20, resnet56, resnet110, vgg16
from .imagenet import alexnet, resnet50
from .lstman4 import lstman4, lstman4_small
from .ptb import lstm, lstm_small

# What a factory takes is the size of its output: labels, vocabulary or classes; all have defaults.
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
}

__all__ = ["MODELS"]
