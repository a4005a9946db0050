"""The front end for DistributedDataParallel: a state and a communication hook."""

import math
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..algorithms import Algorithm
from ..comm import DEFAULT_TIMEOUT, GroupCommunicator
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import Options, Settings
from ..engine.state_dict import saved_layout
from ..feedback.buckets import Bucket, BucketPlan, cut, gather, layout_mismatch, make_buckets, scatter
from ..metrics.events import MetricsSink

_ANOTHER_MODEL = "a parameter of another model: every DDP model needs an OkTopkState of its own"


class OkTopkState(AsyncReducer):
    """What the hook needs from step to step: residuals, thresholds, and a worker thread.

        state = oktopk.OkTopkState(density=0.01, warmup_steps=128)
        ddp_model.register_comm_hook(state, oktopk.oktopk_hook)
        state.guard(optimizer)

    or, in one line that also knows the parameters by name,

        state = oktopk.OkTopkState(density=0.01).register(ddp_model, optimizer)

    One state per model; all ranks make theirs together. Keywords beyond those named are in oktopk.Settings.
    Buckets are DDP's own unless `buckets` says otherwise: "model" gives the paper's k of the whole model.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        algorithm: str | Algorithm = "oktopk",
        density: float = 0.01,
        warmup_steps: int = 128,
        *,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        buckets: BucketPlan | None = None,
        auto: bool = True,
        norm_clip: float | None = None,
        grad_scaler: Scaler | None = None,
        trainer: Any = None,
        sinks: Iterable[MetricsSink] = (),
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        settings = Settings.of(algorithm, density, warmup_steps, norm_clip, auto, options)
        comm = GroupCommunicator.exclusive(process_group, timeout)
        super().__init__(
            settings,
            comm,
            owns_comm=True,
            unused_stay=True,
            poster=comm,
            trainer=trainer,
            grad_scaler=grad_scaler,
            sinks=sinks,
        )
        self._plan = buckets
        self._names: dict[Tensor, str] = {}
        self._complete = False
        """Whether all parameters are known: by name, or from a first backward pass."""
        self._layout: tuple[Bucket, ...] | None = None
        """Buckets to reduce in, if they are not simply DDP's."""
        self._resumed = False
        self._cap_bytes = math.inf
        """Of DDP's buckets, if it is known."""
        self._known: dict[int, tuple[list[Tensor], Bucket]] = {}
        """The buckets of the last step, as DDP numbers them."""
        self._taken: list[tuple[Bucket, Tensor, Future[Tensor]]] = []
        if named_parameters is not None:
            self._name(named_parameters)

    def register(self, model: DistributedDataParallel, optimizer: Optimizer | None = None) -> "OkTopkState":
        """Hook up with a model, know its parameters by name, and guard the optimizer if one is given."""
        if not hasattr(model, "register_comm_hook"):
            raise TypeError(f"register needs the DistributedDataParallel model, got {type(model).__name__}")
        if self._names and any(p not in self._names for p in model.parameters() if p.requires_grad):
            raise ValueError(_ANOTHER_MODEL)
        self._name(model.named_parameters())
        self._cap_bytes = max([model.bucket_bytes_cap, *getattr(model, "bucket_bytes_cap_list", ())])
        model.register_comm_hook(self, oktopk_hook)
        if optimizer is not None:
            self.guard(optimizer)
        return self

    def guard(self, optimizer: Optimizer) -> Any:
        """Make skipped steps exact: the optimizer then finds no gradients, and changes nothing.

        Without it, it finds zeros; momentum and weight decay still act. Returns a handle whose remove() ends it.
        """
        while not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            if not hasattr(optimizer, "optimizer"):
                raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
            optimizer = optimizer.optimizer  # a wrapper, like that of Accelerate
        self.check_momentum(optimizer)
        return optimizer.register_step_pre_hook(self._drop_gradients)

    def _drop_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.skipped:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _name(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = [(name.replace("_orig_mod.", ""), p) for name, p in named_parameters if p.requires_grad]
        prefix = "module." if all(name.startswith("module.") for name, _ in named) else ""
        self._names = {parameter: name.removeprefix(prefix) for name, parameter in named}
        self._known = {}
        self._complete = True

    # The step, as DDP delivers it: bucket after bucket, in the same order on all ranks.

    def take(self, delivered: GradBucket) -> Future[Tensor]:
        """Reduce one of DDP's buckets. With the last one of a backward pass, wait for all of them.

        All futures are completed together at the end, because only then is it known whether the step counts.
        DDP waits for them at that point anyway; an error is raised here, in the middle of backward().
        """
        if delivered.index() == 0:  # if a backward pass has failed in the middle, its buckets are still here
            self.abandon(overwritten=True)
            self._taken = []
        flat = delivered.buffer()
        bucket = self._bucket_of(delivered)
        future: Future[Tensor] = Future() if flat.is_cpu else Future(devices=[flat.device])
        self._taken.append((bucket, flat, future))
        last = delivered.is_last()
        if self._plan is not None or self._resumed or self.settings.norm_clip is not None:
            if last:
                self._submit_held()
        elif not last or len(self._taken) > 1 or not self.sum_alone(bucket, flat):
            for piece, place in self._pieces(bucket, flat.element_size()):
                self.submit(piece, flat[place], last)
            if last:
                self.finish()
        if last:
            self._complete = True
            for _, buffer, waiting in self._taken:
                waiting.set_result(buffer)
            self._taken = []
        return future

    def _pieces(self, bucket: Bucket, width: int) -> list[tuple[Bucket, slice]]:
        """The bucket as it is, if it is one that DDP keeps.

        In its first step DDP has one bucket for the whole model. If that step is sparse, it goes in pieces of the
        size of those that follow: to select from all of it at once takes memory that is never needed again.
        """
        kept = width * sum(bucket.sizes[:-1]) < self._cap_bytes
        if kept or not self._steps.goes_sparse:
            return [(bucket, slice(None))]
        return cut(bucket, int(4 / width * self._cap_bytes))

    def _bucket_of(self, delivered: GradBucket) -> Bucket:
        parameters, index = delivered.parameters(), delivered.index()
        known, bucket = self._known.get(index, ([], None))
        if bucket is not None and len(known) == len(parameters) and all(map(is_, known, parameters)):
            return bucket
        for parameter in parameters:
            if parameter not in self._names:
                if self._complete:
                    raise ValueError(_ANOTHER_MODEL)
                self._names[parameter] = f"#{len(self._names)}"
        bucket = Bucket(tuple(self._names[p] for p in parameters), tuple(p.numel() for p in parameters))
        self._known[index] = parameters, bucket
        return bucket

    def _submit_held(self) -> None:
        """Reduce the whole model at once, in buckets that need not be those DDP has now."""
        delivered = [(bucket, flat) for bucket, flat, _ in self._taken]
        factor = self.clip_factor(flat for _, flat in delivered)
        if factor != 1.0:
            torch._foreach_mul_([flat for _, flat in delivered], factor)
        layout = self._choose_layout([bucket for bucket, _ in delivered])
        grads = {name: flat[place] for bucket, flat in delivered for name, place in bucket.places.items()}
        whole, moved = dict(delivered), {}
        for bucket in layout:
            if bucket not in whole:
                first = grads[bucket.names[0]]
                flat = whole[bucket] = moved[bucket] = first.new_empty(bucket.size)
                gather(bucket, grads, flat)
        if len(layout) > 1 or not self.sum_alone(layout[0], whole[layout[0]]):
            for bucket in layout:
                self.submit(bucket, whole[bucket], last=bucket is layout[-1])
            self.finish()
        for bucket, flat in moved.items():
            scatter(bucket, flat, grads)

    def _choose_layout(self, delivered: list[Bucket]) -> tuple[Bucket, ...]:
        """The buckets to reduce in: on the first step after a checkpoint its own, then those planned, or DDP's."""
        sizes = {name: size for bucket in delivered for name, size in zip(bucket.names, bucket.sizes, strict=True)}
        if self._resumed:
            self._resumed = False
            saved = tuple(self._steps.lanes)
            if saved and (problem := layout_mismatch(saved, sizes)):
                raise ValueError(problem)
            self._layout = saved or None
        if self._plan is None:
            return self._layout or tuple(delivered)
        if self._layout is None:
            names = {name: index for index, name in enumerate(self._names.values())}
            ordered = dict(sorted(sizes.items(), key=lambda item: names[item[0]]))
            kinds = {name: (p.dtype, p.device) for p, name in self._names.items()}
            self._layout = make_buckets(ordered, self._plan, kinds)
        return self._layout

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where this rank's state_dict() was taken. Load it before the first backward pass.

        A new DDP model starts with other buckets than it will have later. The first step is reduced in those of
        the checkpoint, so that it gives the same bits.
        """
        layout = saved_layout(saved)
        if layout and self._names and self._complete:
            problem = layout_mismatch(layout, {name: p.numel() for p, name in self._names.items()})
            if problem:
                raise ValueError(problem)
        super().load_state_dict(saved)
        self._resumed, self._layout = True, None


def oktopk_hook(state: OkTopkState, bucket: GradBucket) -> Future[Tensor]:
    """The hook for DistributedDataParallel.register_comm_hook: averages gradients by sparse allreduce.

    1. DDP hands over a bucket as soon as backward has filled it. A dense sum begins at once; sparse buckets wait
       for others to share messages with (`join`), and the worker thread exchanges them.
    2. Dense steps (the warm-up) sum all entries; sparse ones add the residual, exchange the entries that matter
       by the algorithm of the state, and keep the rest in the residual.
    3. With the last bucket of a backward pass the hook waits for all of them: either all results are in place, or
       some rank met a number that is not finite and the whole step is skipped, on all ranks.
    """
    return state.take(bucket)
