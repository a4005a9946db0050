"""Language modelling on Penn Treebank with an LSTM; the metric is perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from ..data.problems import DataError
from ..data.text.ptb import END, IGNORED, Columns, Stretches, Window, embedded_text, read_text
from ..models.ptb import State, WordLSTM, lstm, lstm_small
from .base import DataSource, Shard, Tally, Task, Workload
from .schedules import step_decay


class LanguageModelTask(Task[Window]):
    """Predicts the next word. Within an epoch the hidden state carries over from window to window."""

    metric = "val perplexity"

    def __init__(self, factory: Callable[[int], WordLSTM], source: DataSource, share: Shard) -> None:
        text = embedded_text() if source.folder is None else read_text(source.folder)
        words = text.vocabulary.words
        model = factory(len(words))
        self.model: nn.Module = model
        self.embedded = source.folder is None
        place = "generated text" if source.folder is None else str(source.folder)
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
        """Mean loss over the words; also updates the hidden state, so windows must come in order."""
        loss, state = self._run(batch, None if batch.first else self._state, "mean")
        # A non-finite state would carry over to every later window.
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

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
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
                    f"the saved hidden state has shape {tuple(part.shape)}, expected {self._shape} "
                    "(layers, batch, units); resume with the same batch size and model"
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
        build=partial(LanguageModelTask, factory),
        batch_size=20,
        max_epochs=50,
        schedule=step_decay(25, 40),
        optimizer=SGD,
        momentum=0.0,
        weight_decay=0.0,
        clip=0.25,
    )


WORKLOADS = (_workload("lstm", lstm), _workload("lstm-small", lstm_small))
