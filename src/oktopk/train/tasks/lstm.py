"""Words of Penn Treebank by an LSTM: the next word from all before it. Its metric is perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from ..data.problems import DataError
from ..data.text.words import END, IGNORED, Columns, Stretches, Window, embedded_text, read_text
from ..models.ptb import State, WordLSTM, lstm, lstm_small
from .base import Share, Source, Tally, Task, Workload
from .schedules import tenth_at


class Words(Task[Window]):
    """The hidden state goes on from window to window within an epoch, each rank's for its own columns."""

    metric = "val perplexity"

    def __init__(self, factory: Callable[[int], WordLSTM], source: Source, share: Share) -> None:
        text = embedded_text() if source.folder is None else read_text(source.folder)
        words = text.vocabulary.words
        model = factory(len(words))
        self.model: nn.Module = model
        self.embedded = source.folder is None
        place = "the embedded text" if source.folder is None else str(source.folder)
        self.data = f"{len(text.train):,} + {len(text.valid):,} words, {len(words):,} different, of {place}"
        self._columns = Columns(text.train, share.world, share.rank, share.batch, share.nsteps, share.seed)
        before = text.vocabulary.encode([END])
        self._valid = Stretches(text.valid, int(before), share.world, share.rank, share.batch)
        self.steps_per_epoch = self._columns.steps
        self._shape = (model.lstm.num_layers, share.batch, model.lstm.hidden_size)
        self._state: State | None = None

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Window]:
        return self._columns.batches(epoch, first_step)

    def loss(self, batch: Window) -> Tensor:
        """The mean over the words. Going through the windows in their order is what carries the state on."""
        loss, state = self._run(batch, None if batch.first else self._state, "mean")
        # A state that is not finite would spoil every window to come.
        self._state = state if all(bool(part.isfinite().all()) for part in state) else None
        return loss

    def validate(self) -> Tally:
        tally = Tally({"loss": 0.0, "samples": 0.0})
        for windows in self._valid.batches():
            state: State | None = None
            for window in windows:
                loss, state = self._run(window, state, "sum")
                tally.add(loss=loss.item(), samples=int((window.targets != IGNORED).sum()))
        return tally

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        if not sums["samples"]:
            return {}
        loss = sums["loss"] / sums["samples"]
        return {"val loss": loss, "val perplexity": math.inf if loss > 700 else math.exp(loss)}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._state is None else dict(zip(("hidden", "cell"), self._state, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self._state = None
            return
        hidden, cell = state["hidden"], state["cell"]
        for part in (hidden, cell):
            if tuple(part.shape) != self._shape:
                raise DataError(
                    f"the saved hidden state has the shape {tuple(part.shape)}, this run's {self._shape} (layers, "
                    "batch, units); go on with the batch size and the model that it was saved with"
                )
        self._state = hidden, cell

    def _run(self, window: Window, state: State | None, reduction: str) -> tuple[Tensor, State]:
        device = next(self.model.parameters()).device
        if state is not None:
            state = state[0].to(device), state[1].to(device)
        logits, state = self.model(window.words.to(device), state)
        targets = window.targets.to(device).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction=reduction)
        return loss, state


def _workload(dnn: str, factory: Callable[[int], WordLSTM]) -> Workload:
    return Workload(
        dnn=dnn,
        dataset="ptb",
        build=partial(Words, factory),
        batch_size=20,
        max_epochs=50,
        schedule=tenth_at(25, 40),
        optimizer=SGD,
        momentum=0.0,
        weight_decay=0.0,
        clip=0.25,
    )


WORKLOADS = (_workload("lstm", lstm), _workload("lstm-small", lstm_small))
