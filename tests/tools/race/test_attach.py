"""Contenders are attached to a model, and rehearse before the clock starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from oktopk.tools.race.attach import rehearse
from oktopk.tools.race.contenders import parse_contender
from tests.support import worlds
from tests.support.stepping import same_bits
from tests.support.training import mlp, parameters_of

NAMED = "oktopk:dense=*.bias:buckets=[['4.weight','4.bias'],['2.weight','2.bias','0.weight']]"


def rehearsed(connect: Callable[..., Any]) -> bool:
    network: nn.Module = mlp()
    network[0].bias.requires_grad_(False)
    before = parameters_of(network)
    rehearse(parse_contender(NAMED), network)
    unused = all(p.grad is None for p in network.parameters())
    return unused and "forward" not in vars(network) and same_bits(before, parameters_of(network))


def test_a_rehearsal_knows_the_names_of_the_model_and_leaves_it_alone() -> None:
    """Options may name parameters, or have patterns of names."""
    assert worlds.run("gloo", 2, rehearsed) == [True, True]
