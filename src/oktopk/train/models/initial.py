"""First weights of convolutional networks."""

from __future__ import annotations

from torch import nn


def he_normal(model: nn.Module) -> None:
    """He et al. (2015): the variance of the gradient stays the same through every convolution and ReLU."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
