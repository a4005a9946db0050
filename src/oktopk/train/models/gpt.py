"""A decoder-only transformer in the layout of GPT-2: layer norm before each part, learned positions, tied output.

    tokens [batch, length] ─► embedding + positions ─► layers × (attention, MLP) ─► layer norm ─► logits
                                                       each added to its input        [batch, length, vocabulary]

Parameters: layers · 12 · width² and biases, plus the embedding, which the output shares: 4,788,480 for GPT with 65
characters, 124,439,808 for GPT2 with 50,257 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Layers, units of each, attention heads, tokens that a position can look back on, and dropout."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 128
    dropout: float = 0.1


GPT = Size()
GPT_SMALL = Size(layers=4, context=96, dropout=0.0)
GPT2 = Size(layers=12, width=768, heads=12, context=1024)


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.dropout = size.heads, size.dropout
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.mlp1, self.mlp2 = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        x = x + self.drop(self.attended(self._attend(self.norm1(x))))
        inner: Tensor = self.drop(self.mlp2(F.gelu(self.mlp1(self.norm2(x)), approximate="tanh")))
        return x + inner

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class GPTModel(nn.Module):
    """forward(tokens [batch, length]) returns logits [batch, length, vocabulary]."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.drop = nn.Dropout(size.dropout)
        layers = [_Layer(size) for _ in range(size.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(size.width)
        self.apply(_initialise)
        for layer in layers:  # each adds to the residual stream: the sum keeps its variance
            for part in (layer.attended, layer.mlp2):
                nn.init.normal_(part.weight, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embedding(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


def _initialise(module: nn.Module) -> None:
    """As GPT-2 does: normal with a deviation of 0.02, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
