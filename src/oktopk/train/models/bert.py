"""BERT with both pre-training heads, masked words and next sentence; randomly initialised, without a download.

bert-base has 110,106,428 parameters. The word embedding and the masked-word output share one tensor; counted twice
it would be 133,547,324.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from oktopk.utils.extras import install_command

VOCABULARY = 30_522
POSITIONS = 512


def bert_base(vocabulary: int = VOCABULARY) -> nn.Module:
    """12 layers of 768."""
    return _bert(vocab_size=vocabulary, max_position_embeddings=POSITIONS)


def bert_tiny(vocabulary: int = VOCABULARY) -> nn.Module:
    """2 layers of 128, for CPUs."""
    return _bert(
        vocab_size=vocabulary,
        max_position_embeddings=POSITIONS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )


def _bert(**settings: Any) -> nn.Module:
    """Make a BertForPreTraining; given `labels` and `next_sentence_label`, it returns the sum of both losses."""
    try:
        transformers = import_module("transformers")  # imported here: it takes seconds
    except ImportError as error:
        raise ImportError(f"BERT needs transformers: {install_command('train')}") from error
    model: nn.Module = transformers.BertForPreTraining(transformers.BertConfig(**settings))
    return model
