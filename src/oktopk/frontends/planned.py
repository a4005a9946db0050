"""A whole model at once, in buckets that need not be those in which its gradients were delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..engine.async_reducer import AsyncReducer
from ..feedback.buckets import Bucket, BucketPlan, flatten, layout_mismatch, make_buckets, unflatten


class PlannedBuckets:
    """The buckets that the DDP front end reduces in, if they are not simply DDP's.

    On the first step after a checkpoint they are its own, for the same bits; later those of the plan, or DDP's.

    Args:
        plan: how to form buckets; None for DDP's.

    Attributes:
        differ: whether the next step may need other buckets than DDP's, and so all gradients at once.
    """

    def __init__(self, plan: BucketPlan | None) -> None:
        self.plan, self.differ = plan, plan is not None
        self._layout: tuple[Bucket, ...] | None = None
        self._resumed = False

    def resume(self) -> None:
        """Take the buckets of the checkpoint that the engine has loaded, on the next step."""
        self._resumed, self._layout, self.differ = True, None, True

    def reduce(
        self, engine: AsyncReducer, delivered: Sequence[tuple[Bucket, Tensor]], names: Mapping[Tensor, str]
    ) -> None:
        """Clip and reduce the buckets of a step; the results are where the gradients were.

        Args:
            engine: reduces.
            delivered: all buckets of DDP and their gradients.
            names: those of the parameters.
        """
        factor = engine.clip_factor(flat for _, flat in delivered)
        if factor != 1.0:
            torch._foreach_mul_([flat for _, flat in delivered], factor)
        layout = self._choose_layout(engine, [bucket for bucket, _ in delivered], names)
        grads = {name: flat[place] for bucket, flat in delivered for name, place in bucket.places.items()}
        whole, moved = dict(delivered), {}
        for bucket in layout:
            if bucket not in whole:
                first = grads[bucket.names[0]]
                flat = whole[bucket] = moved[bucket] = first.new_empty(bucket.size)
                flatten(bucket, grads, flat)
        for bucket in layout:
            engine.submit(bucket, whole[bucket])
        engine.finish()
        for bucket, flat in moved.items():
            unflatten(bucket, flat, grads)

    def _choose_layout(
        self, engine: AsyncReducer, delivered: Sequence[Bucket], names: Mapping[Tensor, str]
    ) -> tuple[Bucket, ...]:
        sizes = {name: size for bucket in delivered for name, size in zip(bucket.names, bucket.sizes, strict=True)}
        if self._resumed:
            self._resumed, self.differ = False, self.plan is not None
            saved = engine.layout
            if saved and (problem := layout_mismatch(saved, sizes)):
                raise ValueError(problem)
            self._layout = saved or None
        if self.plan is None:
            return self._layout or tuple(delivered)
        if self._layout is None:
            order = {name: index for index, name in enumerate(names.values())}
            ordered = dict(sorted(sizes.items(), key=lambda item: order[item[0]]))
            kinds = {name: (p.dtype, p.device) for p, name in names.items()}
            self._layout = make_buckets(ordered, self.plan, kinds)
        return self._layout
