"""AllReducer: named buckets for a hand-written loop, and for the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..algorithms import Algorithm
from ..comm import DEFAULT_TIMEOUT, Communicator, exclusive_communicator
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import Options, Settings
from ..engine.state_dict import saved_layout
from ..feedback.buckets import (
    DEFAULT_BUCKET_MB,
    Bucket,
    BucketPlan,
    gather,
    layout_mismatch,
    make_buckets,
    scatter,
)
from ..metrics.events import MetricsSink


class AllReducer(AsyncReducer):
    """Averages named gradients over all ranks, sparsely, in buckets, in the background.

        with oktopk.AllReducer(model.named_parameters(), density=0.01) as reducer:
            for batch in data:
                loss(batch).backward()
                reducer.sync({name: p.grad for name, p in model.named_parameters()})
                optimizer.step()

    Keywords beyond those named are in oktopk.Settings. `buckets` is "model" for the whole model at once (the
    paper's k), a size in MB, or lists of names. Without torch.distributed this process is the only rank.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        compressor: str | Algorithm = "oktopk",
        density: float = 0.01,
        comm: Communicator | None = None,
        trainer: Any = None,
        *,
        warmup_steps: int = 128,
        buckets: BucketPlan = DEFAULT_BUCKET_MB,
        auto: bool = False,
        norm_clip: float | None = None,
        grad_scaler: Scaler | None = None,
        sinks: Iterable[MetricsSink] = (),
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        settings = Settings.of(compressor, density, warmup_steps, norm_clip, auto, options)
        self._parameters = dict(_pairs(named_parameters))
        self.buckets = make_buckets(self._sizes(), buckets, _kinds(self._parameters))
        super().__init__(
            settings,
            exclusive_communicator(timeout) if comm is None else comm,
            owns_comm=comm is None,
            trainer=trainer,
            grad_scaler=grad_scaler,
            sinks=sinks,
        )
        self._flat: dict[Bucket, Tensor] = {}

    def sync(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Replace each gradient by the mean over all ranks, and return them by name.

        A parameter whose gradient is missing counts as zeros here, and gets one. In a skipped step all of them
        are zeros: look at `skipped`, and leave out optimizer.step().
        """
        unknown = [name for name in grads if name not in self._parameters]
        if unknown:
            raise ValueError(f"unknown parameter {unknown[0]!r}: gradients go by the names given at the start")
        for name, grad in grads.items():
            if grad is not None and grad.shape != self._parameters[name].shape:
                shape = tuple(self._parameters[name].shape)
                raise ValueError(f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {shape}")
        factor = self.clip_factor(grad for grad in grads.values() if grad is not None)
        for bucket in self.buckets:
            self.submit_named(bucket, grads, factor)
        return self.finish_named(grads)

    def submit_named(self, bucket: Bucket, grads: Mapping[str, Tensor | None], factor: float = 1.0) -> None:
        """Hand over the gradients of a bucket; the worker copies them into one vector."""
        flat = self._flat_for(bucket)
        steps, scale = self._steps, self._scale()
        held = {name: grads.get(name) for name in bucket.names}

        @torch.no_grad()
        def job() -> None:
            gather(bucket, held, flat)
            if factor != 1.0:
                flat.mul_(factor)
            steps.reduce(bucket, flat, scale)

        self._hand_over(job)

    @torch.no_grad()
    def finish_named(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Wait for the step, and put the results where the gradients were."""
        self.finish()
        result = {}
        for bucket in self.buckets:
            flat = self._flat_for(bucket)
            scatter(bucket, flat, grads)
            for name, place in bucket.places.items():
                grad = grads.get(name)
                made = grad if grad is not None else flat[place].view(self._parameters[name].shape).clone()
                result[name] = made
        return result

    def extend(self, named_parameters: Mapping[str, Tensor]) -> None:
        """More parameters, in buckets of their own after the others."""
        self.drain()
        self._parameters |= named_parameters
        new = {name: p.numel() for name, p in named_parameters.items() if p.requires_grad}
        self.buckets += make_buckets(new, kinds=_kinds(self._parameters)) if new else ()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where this rank's state_dict() was taken, in the buckets that it had."""
        layout = saved_layout(saved)
        if layout and (problem := layout_mismatch(layout, self._sizes())):
            raise ValueError(problem)
        super().load_state_dict(saved)
        self.buckets = layout or self.buckets
        self._flat = {}

    def _sizes(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self._parameters.items() if p.requires_grad}

    def _flat_for(self, bucket: Bucket) -> Tensor:
        if bucket not in self._flat:
            like = self._parameters[bucket.names[0]]
            self._flat[bucket] = torch.empty(bucket.size, dtype=like.dtype, device=like.device)
        return self._flat[bucket]


def _pairs(named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for pair in named_parameters:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError("named_parameters must be pairs of name and tensor: pass model.named_parameters()")
        yield pair


def _kinds(parameters: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.device]]:
    return {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
