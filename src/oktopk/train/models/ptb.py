"""The language model of Zaremba et al. (2014) for Penn Treebank: embedding, two LSTM layers, softmax over words.

The embedding and the output layer are two matrices (untied), as in the paper. The paper's LSTM has one bias
per gate, PyTorch's has two: 66,034,000 parameters here for 10,000 words, against 66,022,000.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

VOCABULARY = 10_000
STEPS = 35  # words per window: how far backpropagation through time reaches

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """Units of the embedding and of each layer, number of layers, dropout, and range ±`start` of the initial
    weights.
    """

    units: int = 1500
    layers: int = 2
    dropout: float = 0.65
    start: float = 0.04


class WordLSTM(nn.Module):
    """forward(words [steps, batch], state) returns logits [steps, batch, vocabulary] and the state for the next
    window.

    The state is detached: backpropagation stops at the window.
    """

    def __init__(self, size: Size, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.units)
        self.lstm = nn.LSTM(size.units, size.units, size.layers, dropout=size.dropout)
        self.output = nn.Linear(size.units, vocabulary)
        self.dropout = nn.Dropout(size.dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -size.start, size.start)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Without a state, start from zeros."""
        x, (hidden, cell) = self.lstm(self.dropout(self.embedding(words)), state)
        return self.output(self.dropout(x)), (hidden.detach(), cell.detach())


def lstm(vocabulary: int = VOCABULARY) -> WordLSTM:
    """The paper's large model."""
    return WordLSTM(Size(), vocabulary)


def lstm_small(vocabulary: int = VOCABULARY) -> WordLSTM:
    """The paper's small model: 200 units, no dropout."""
    return WordLSTM(Size(units=200, dropout=0.0, start=0.1), vocabulary)
