"""Weight initialisation of convolutional networks."""

from __future__ import annotations

from torch import nn


def he_normal(model: nn.Module) -> None:
    """Initialise all convolutions as in He et al. (2015), which keeps the gradient's variance."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
