"""AllReducer: averages named gradients in a hand-written training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..algorithms import Algorithm
from ..comm import Communicator, checking_together, exclusive_communicator
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import Density, Options, Settings
from ..feedback.buckets import DEFAULT_BUCKET_MB, Bucket, BucketPlan
from ..metrics.events import MetricsSink
from .base import TrainerFrontEnd, check_sinks, check_supported, choose_algorithm, describe
from .bucketed import BucketedGradients, check_pairs


class AllReducer(TrainerFrontEnd):
    """Averages named gradients over all ranks by sparse all-reduce with error feedback, bucket by bucket.

    Without torch.distributed this process is the only rank. Parameters that are frozen or unfrozen later, on all
    ranks, are left out or averaged from the next sync() on.

    Args:
        named_parameters: pairs of name and parameter, as from model.named_parameters().
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object.
        density: share of entries that each rank sends in a sparse step; "auto" to choose it by measurement, within
            a `budget`; or pairs (step, density), such as the `schedule` of another run, to repeat that one.
        comm: the ranks; by default those of torch.distributed, over connections of its own.
        trainer: an object whose lists of metrics are filled; see set_trainer().
        warmup_steps: number of dense steps before the sparse phase; None for a share of `total_steps`.
        buckets: "model" for one bucket (the paper's k of the whole model), a size in MB, or lists of names.
        auto: measure dense and sparse steps, and use the faster way.
        norm_clip: scale this rank's gradient down to this norm before it is compressed.
        grad_scaler: the GradScaler whose scale the gradients have.
        sinks: where the metrics of every step go.
        timeout: seconds that a rank that is alive may keep others waiting; by default the process group's own.
        compressor: another name for `algorithm`.
        **options: the other fields of `oktopk.Settings`.

    Example:
        >>> import torch, oktopk
        >>> model = torch.nn.Linear(2, 1)
        >>> with oktopk.AllReducer(model.named_parameters(), density=0.01, warmup_steps=0) as reducer:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     averaged = reducer.sync({name: p.grad for name, p in model.named_parameters()})
        >>> sorted(averaged)
        ['bias', 'weight']
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], algorithm: str | Algorithm = "oktopk",
        density: Density = 0.01, comm: Communicator | None = None, trainer: Any = None, *,
        warmup_steps: int | None = 128, buckets: BucketPlan = DEFAULT_BUCKET_MB, auto: bool = False,
        norm_clip: float | None = None, grad_scaler: Scaler | None = None, sinks: Iterable[MetricsSink] = (),
        timeout: float | None = None, compressor: str | Algorithm | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        ranks = exclusive_communicator(timeout) if comm is None else comm
        with checking_together(ranks, owned=comm is None) as terms:
            chosen = choose_algorithm(algorithm, compressor)
            settings = Settings.from_options(chosen, density, warmup_steps, norm_clip, auto, options)
            named = check_pairs(named_parameters)
            check_supported(named.items())
            checked = check_sinks(sinks, trainer)
            self._gradients = BucketedGradients(named, buckets)
            terms |= settings.terms() | describe(named) | {"buckets": self._gradients.buckets}
        self._held = AsyncReducer(settings, ranks, owns_comm=comm is None, grad_scaler=grad_scaler, sinks=checked)
        self._held.plan(self._gradients.size)

    @property
    def schedule(self) -> list[tuple[int, float | None]]:
        """The density of every step so far, as pairs (step, density) from that step on; None is dense.

        Passed as `density=` of another run, it repeats this one to the bit, whatever the steps take there.
        """
        return self._engine.schedule

    @property
    def step(self) -> int:
        """How many steps have been averaged, skipped ones included."""
        return self._engine.step

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order they are exchanged."""
        return self._gradients.buckets

    def sync(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Replace every gradient by the mean over all ranks.

        In a skipped step all of them are zeros: check `skipped`, and leave out optimizer.step().

        Args:
            grads: gradients by name, changed in place. A missing one counts as zeros.

        Returns:
            The gradients of all parameters that require one, by name; missing ones are made.
        """
        self._check_gradients(grads)
        with self._engine.uninterrupted():
            self._gradients.follow(self._engine)
            factor = self._engine.clip_factor(grad for grad in grads.values() if grad is not None)
            for bucket in self.buckets:
                self._gradients.submit(self._engine, bucket, grads, factor)
            return self._gradients.finish(self._engine, grads)

    def _check_gradients(self, grads: Mapping[str, Tensor | None]) -> None:
        parameters = self._gradients.parameters
        for name, grad in grads.items():
            if name not in parameters:
                raise ValueError(
                    f"unknown parameter {name!r}: expected a name passed to AllReducer(named_parameters=…)"
                )
            if grad is not None and grad.shape != parameters[name].shape:
                shape = tuple(parameters[name].shape)
                raise ValueError(f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {shape}")
            if grad is not None and not parameters[name].requires_grad:
                raise ValueError(f"{name} does not require a gradient, so it is not averaged: leave it out")

    def abandon(self) -> None:
        """Give up a step that sync() could not finish, on all ranks: what was sent returns to the residuals."""
        self._engine.abandon()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where this rank's state_dict() was taken, in the buckets that it had.

        Args:
            state_dict: of the same rank and number of ranks; see `oktopk.redistribute` for another number.
        """
        self._gradients.load_state_dict(self._engine, state_dict)
