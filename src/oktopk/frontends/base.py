"""What all front ends share: the engine that they hold, and what they show users of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..algorithms import Algorithm, Dense
from ..comm import Communicator, agree
from ..engine.async_reducer import AsyncReducer
from ..engine.settings import Settings
from ..metrics.events import MetricsSink, StepEvent
from ..metrics.sinks import TrainerLists

_log = logging.getLogger(__name__)
T = TypeVar("T")
Self = TypeVar("Self", bound="FrontEnd")


class FrontEnd:
    """Holds an engine, and shows what users call. All of it is between steps, or waits until it is."""

    _held: AsyncReducer | None = None

    @property
    def _engine(self) -> AsyncReducer:
        if self._held is None:
            self._held = self._connect()
        return self._held

    def _connect(self) -> AsyncReducer:
        """The engine of a copy that is used for the first time."""
        raise AttributeError("there is no engine yet")

    @property
    def last(self) -> StepEvent | None:
        """The metrics of the last step; None before the first one, also that of a copy."""
        return None if self._held is None else self._held.last

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self._held is not None and self._held.skipped

    def add_sink(self, sink: MetricsSink) -> None:
        """Pass every step from now on to one more sink.

        Args:
            sink: an object of `oktopk.metrics.sinks`, or anything with emit() and close().
        """
        self._engine.add_sink(sink)

    def stats(self) -> dict[str, float]:
        """The present state in figures, for loggers: steps, densities, bytes, seconds of the last step.

        There are none of a copy that was not used.
        """
        return {} if self._held is None else self._held.stats()

    def summary(self) -> str:
        """The present state in words: dense or sparse and why, bytes, speed-up, the next comparison.

        It has the figures of stats(). There are none of a copy that was not used.
        """
        return "Not used so far." if self._held is None else self._held.summary()

    def run(self, job: Callable[[Communicator], T]) -> T:
        """Let all ranks communicate between steps: to save a checkpoint, say.

        Args:
            job: called with the communicator, in the worker thread; all ranks must pass the same.

        Returns:
            What `job` returns.
        """
        return self._engine.run(job)

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank, as tensors and primitives: every rank saves its own."""
        return self._engine.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where this rank's state_dict() was taken.

        Args:
            state_dict: of the same rank and number of ranks; see `oktopk.redistribute` for another number.
        """
        self._engine.load_state_dict(state_dict)

    def close(self) -> None:
        """End the worker thread and its connections, and close the sinks. Calling it twice is fine."""
        self._engine.close()

    def _agree_unapplied(self) -> None:
        """The last mean was not applied here. That is right if it was so on all ranks, and else an interrupt."""
        step = self._engine.step
        self.run(lambda comm: agree(comm, {"steps whose mean was not applied": step}))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine!r})"

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._held is not None:
            self._held.fail()
        self.close()


class TrainerFrontEnd(FrontEnd):
    """A front end to which a trainer can be linked later; the DDP front end has only `trainer=`."""

    @property
    def schedule(self) -> list[tuple[int, float | None]]:
        """The density of every step so far, as pairs (step, density) from that step on; None is dense.

        Passed as `density=` of another run, it repeats this one to the bit, whatever the steps take there.
        """
        return self._engine.schedule

    def set_trainer(self, trainer: Any) -> None:
        """Fill the trainer's lists of metrics from now on, one entry per step.

        Args:
            trainer: any object; it gets the lists `sparsities`, `compression_ratios`, `communication_sizes`.
        """
        self.add_sink(TrainerLists(trainer))


def choose_algorithm(algorithm: str | Algorithm, compressor: str | Algorithm | None) -> str | Algorithm:
    """The algorithm; `compressor` is another name for the same argument."""
    if compressor is None:
        return algorithm
    if algorithm not in ("oktopk", compressor):
        raise ValueError(f"algorithm={algorithm!r} and compressor={compressor!r} are the same argument: give one")
    return compressor


def check_momentum(settings: Settings, optimizer: Optimizer) -> None:
    """Raise if momentum correction meets an optimizer that has a momentum of its own."""
    if settings.momentum and any(
        group.get("momentum") or any(group.get("betas", ())[:1]) for group in optimizer.param_groups
    ):
        raise ValueError(
            f"momentum correction (momentum={settings.momentum}) replaces the optimizer's own momentum: set that "
            f"of {type(optimizer).__name__} to 0, or use plain SGD"
        )


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether the optimizer divides by the root of a second moment; it has an eps, or betas, for that."""
    return any("eps" in group or "betas" in group for group in optimizer.param_groups)


def warn_adaptive(settings: Settings, optimizer: Optimizer, rank: int) -> None:
    """Say on rank 0, once, what sparse gradients cost an adaptive optimizer, and what to use instead."""
    sparse = settings.fusion_density < 1 and not isinstance(settings.algorithm, Dense)
    if rank == 0 and sparse and is_adaptive(optimizer):
        _say_adaptive(type(optimizer).__name__)


@cache
def _say_adaptive(name: str) -> None:
    _log.warning(
        "oktopk: sparse gradients slow down adaptive optimizers such as %s: at 1 %% a GPT of 3.2M parameters took "
        "2.1 times as many steps as dense. oktopk.LocalOptimizer (oktopk train --average updates) took no more",
        name,
    )


def check_sinks(sinks: Iterable[MetricsSink], trainer: object) -> list[MetricsSink]:
    """The sinks, that of a trainer last; a TypeError if one of them cannot be a sink."""
    if not isinstance(sinks, Iterable):
        raise TypeError(f"sinks must be a list of sinks, got {type(sinks).__name__}")
    found = list(sinks)
    for sink in found:
        if isinstance(sink, type) or not (
            callable(getattr(sink, "emit", None)) and callable(getattr(sink, "close", None))
        ):
            raise TypeError(f"sinks must have emit() and close(), got {sink!r}")
    if trainer is None:
        _log.debug("no trainer is linked: its lists of metrics are not filled")
    else:
        found.append(TrainerLists(trainer))
    return found


def describe(parameters: Mapping[str, Tensor]) -> dict[str, object]:
    """What ranks must agree on about their parameters."""
    return {"parameters": list(parameters), "shapes": [(*p.shape, p.dtype) for p in parameters.values()]}


def check_supported(named: Iterable[tuple[str, Tensor]], model: nn.Module | None = None) -> None:
    """Raise if a gradient will be complex, or sparse as far as a model tells."""
    for name, parameter in named:
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ValueError(
                f"unsupported dtype {parameter.dtype} of parameter {name}; expected a floating-point dtype: keep "
                "its real and imaginary parts as a real parameter, and use torch.view_as_complex in forward"
            )
    for name, module in model.named_modules() if model is not None else ():
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"unsupported sparse gradients of {name or type(module).__name__}: use sparse=False in this layer"
            )
