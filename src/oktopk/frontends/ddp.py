"""The front end for DistributedDataParallel: a state and a communication hook."""

import copy
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..algorithms import Algorithm
from ..comm import GroupCommunicator, checking_together
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import Density, Options, Settings
from ..engine.state_dict import saved_layout
from ..feedback.buckets import Bucket, BucketPlan, check_plan, layout_mismatch
from ..metrics.events import MetricsSink
from .base import FrontEnd, check_momentum, check_sinks, check_supported, describe, warn_adaptive
from .copies import Copied
from .planned import PlannedBuckets
from .watching import GuardHandle, ModelWatch, OptimizerGuard, bucket_problem, model_problem, unwrap

_ANOTHER_MODEL = "a parameter of another model: every DDP model needs an OkTopkState of its own"


class OkTopkState(FrontEnd):
    """Averages the gradients of a DDP model by sparse all-reduce with error feedback: the state of `oktopk_hook`.

    All ranks make theirs together. Buckets are DDP's own unless `buckets` says otherwise.

    A copy (copy.deepcopy, pickle, torch.save of the DDP model) has the settings, and what state_dict() has. It
    connects to the default process group when it is first used, on all ranks together.

    Args:
        process_group: the ranks; by default all of torch.distributed. It must be the group of the DDP model.
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object.
        density: share of entries that each rank sends in a sparse step, by default 1 %; "auto" to choose it by
            measurement, within a `budget`; or pairs (step, density), such as state_dict()["schedule"] of another
            run, to repeat it.
        warmup_steps: number of dense steps before the sparse phase. By default 128 if you pass a density, else a
            share of `total_steps`: 1 %, and 8 % more in which the density falls from 25 %.
        named_parameters: pairs of name and parameter, for checkpoints and errors; register() knows them by itself.
        buckets: "model" for one bucket (the paper's k of the whole model), a size in MB, or lists of names.
        auto: measure dense and sparse steps, and use the faster way.
        norm_clip: scale this rank's gradient down to this norm before it is compressed.
        grad_scaler: the GradScaler whose scale the gradients have. The guard notices by itself one whose step()
            takes the optimizer's; it must be passed with `norm_clip` and fp16 `warmup_values`, to resume, and
            without a guard.
        trainer: an object that gets the lists `sparsities`, `compression_ratios` and `communication_sizes`, with
            one entry per step.
        sinks: where the metrics of every step go.
        timeout: seconds that a rank that is alive may keep others waiting; by default the process group's own.
        **options: the other fields of `oktopk.Settings`.

    Example:
        One line that also gives checkpoints and errors the parameters' names::

            state = oktopk.OkTopkState(density=0.01).register(ddp_model, optimizer)

        The same with torch's own function::

            state = oktopk.OkTopkState(density=0.01)
            ddp_model.register_comm_hook(state, oktopk.oktopk_hook)
            state.guard(optimizer)
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, algorithm: str | Algorithm = "oktopk",
        density: Density | None = None, warmup_steps: int | None = None, *,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None, buckets: BucketPlan | None = None,
        auto: bool = True, norm_clip: float | None = None, grad_scaler: Scaler | None = None, trainer: Any = None,
        sinks: Iterable[MetricsSink] = (), timeout: float | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        self._begin_unnamed(buckets, timeout)
        comm = GroupCommunicator.exclusive(process_group, timeout)
        with checking_together(comm, owned=True) as terms:
            settings = Settings.from_options(algorithm, density, warmup_steps, norm_clip, auto, options)
            check_plan(buckets)
            checked = check_sinks(sinks, trainer)
            if named_parameters is not None:
                self._name(named_parameters)
            terms |= (
                settings.terms() | describe({name: p for p, name in self._names.items()}) | {"buckets": buckets}
            )
        self._held = AsyncReducer(
            settings, comm, owns_comm=True, unused_stay=True, grad_scaler=grad_scaler, sinks=checked
        )

    def _begin_unnamed(self, plan: BucketPlan | None, timeout: float | None) -> None:
        self._planned, self._timeout = PlannedBuckets(plan), timeout
        self._copied: Copied | None = None
        self._model: ModelWatch | None = None
        self._guard = OptimizerGuard(lambda: self.skipped, self._notice_scaler)
        self._names: dict[Tensor, str] = {}
        self._frozen: dict[str, int] = {}
        """The sizes of parameters that require no gradient, as far as they are known."""
        self._complete = False
        """Whether all parameters are known: by name, or from a first backward pass."""
        self._known: dict[int, tuple[list[Tensor], Bucket]] = {}
        """The buckets of the last step, as DDP numbers them."""
        self._delivered: list[tuple[Bucket, Tensor, Future[Tensor]]] = []

    @property
    def step(self) -> int:
        """How many steps have been averaged, skipped ones included."""
        return self._engine.step if self._copied is None else int(self._copied.state["step"])

    def register(self, model: DistributedDataParallel, optimizer: Optimizer | None = None) -> "OkTopkState":
        """Register the hook with a model, name its parameters, and guard the optimizer if one is given.

        Args:
            model: the DistributedDataParallel model; one per state.
            optimizer: the optimizer to guard(), or None.

        Returns:
            The state itself.
        """
        with self._engine.checking_together() as terms:
            if problem := model_problem(model):
                raise TypeError(problem)
            check_supported(model.named_parameters(), model)
            if self._names and any(p not in self._names for p in model.parameters() if p.requires_grad):
                raise ValueError(_ANOTHER_MODEL)
            if optimizer is not None:
                check_momentum(self._settings, unwrap(optimizer))
            terms |= describe({name: p for name, p in model.named_parameters() if p.requires_grad})
        model.register_comm_hook(self, oktopk_hook)
        self._name(model.named_parameters())
        self._model = ModelWatch(model)
        if optimizer is not None:
            self.guard(optimizer)
        self._engine.plan(sum(p.numel() for p in self._names))
        return self

    def guard(self, optimizer: Optimizer) -> GuardHandle:
        """Make skipped steps exact: the optimizer then finds no gradients, and changes nothing.

        It also notices that an interrupt has ended optimizer.step() in the middle, or left it out on this rank,
        and the GradScaler whose step() calls the optimizer's. An unguarded optimizer sees zero gradients: its
        momentum and weight decay still act. Until a guarded one has stepped it sees NaN, because a GradScaler may
        be at work: guard all optimizers of the model.

        Args:
            optimizer: a torch optimizer, or a wrapper such as Accelerate's.

        Returns:
            A handle whose remove() ends the guard.
        """
        optimizer = unwrap(optimizer)
        check_momentum(self._settings, optimizer)
        if self._held is not None:  # a copy is not connected, and its original has said so
            warn_adaptive(self._settings, optimizer, self._held.rank)
        return self._guard.watch(optimizer)

    def _notice_scaler(self, scaler: Scaler | None) -> None:
        """An optimizer steps: a GradScaler that was not passed is known from here on."""
        if self._held is not None:  # otherwise a copy that was never used
            self._held.notice_scaler(scaler)

    def _name(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = [(name.replace("_orig_mod.", ""), p) for name, p in named_parameters]
        prefix = "module." if all(name.startswith("module.") for name, _ in named) else ""
        self._names = {p: name.removeprefix(prefix) for name, p in named if p.requires_grad}
        self._frozen = {name.removeprefix(prefix): p.numel() for name, p in named if not p.requires_grad}
        self._known = {}
        self._complete = True

    # The step, as DDP delivers it: bucket after bucket, in the same order on all ranks.

    def _reduce(self, delivered: GradBucket) -> Future[Tensor]:
        """Submit one of DDP's buckets; an error is raised here, in the middle of backward(), and on all ranks."""
        engine = self._engine  # a copy connects here: if that fails, it is not tried again
        try:
            with engine.uninterrupted():
                return self._take(delivered)
        except Exception as error:
            engine.give_up(error)

    def _take(self, delivered: GradBucket) -> Future[Tensor]:
        """Submit a bucket. With the last one of a backward pass, wait for all of them.

        All futures are completed together at the end, because only then is it known whether the step counts.
        DDP waits for them at that point anyway.
        """
        if problem := bucket_problem(delivered):
            raise ValueError(problem)
        if delivered.index() == 0:
            self._begin_step()
        flat, bucket = delivered.buffer(), self._bucket_of(delivered)
        future: Future[Tensor] = Future() if flat.is_cpu else Future(devices=[flat.device])
        self._delivered.append((bucket, flat, future))
        holds = self._planned.differ or self._engine.settings.norm_clip is not None
        if not holds:
            self._engine.submit(bucket, flat)
        if delivered.is_last():
            if holds:
                self._planned.reduce(self._engine, [(b, held) for b, held, _ in self._delivered], self._names)
            else:
                self._engine.finish()
            self._complete, self._guard.applied = True, self.skipped
            for _, buffer, waiting in self._delivered:
                waiting.set_result(buffer)
            self._delivered = []
        return future

    def _begin_step(self) -> None:
        self._guard.check()
        if self._model is not None:
            if problem := self._model.problem():
                raise ValueError(problem)
            if self._guard.handles and not self._guard.applied and not self._model.joins:
                self._agree_unapplied()
        self._engine.abandon(overwritten=True)  # a backward pass that has failed in the middle
        self._engine.await_scaler(self._guard.waits)
        self._delivered = []

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
        check_supported((self._names[p], p) for p in parameters)  # DDP delivers complex ones as real ones
        bucket = Bucket(tuple(self._names[p] for p in parameters), tuple(p.numel() for p in parameters))
        self._known[index] = parameters, bucket
        return bucket

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where this rank's state_dict() was taken. Load it before the first backward pass.

        A new DDP model starts with other buckets than it will have later. The first step is reduced in those of
        the checkpoint, so that it gives the same bits.

        Args:
            state_dict: of the same rank and number of ranks; see `oktopk.redistribute` for another number.
        """
        layout, sizes = saved_layout(state_dict), None
        if self._names and self._complete:
            sizes = {name: p.numel() for p, name in self._names.items()}
            if layout and (problem := layout_mismatch(layout, sizes)):
                raise ValueError(problem)
            sizes |= self._frozen
        self._engine.load_state_dict(state_dict, sizes)
        self._planned.resume()
        self._guard.reset()

    # Copies.

    @property
    def _settings(self) -> Settings:
        return self._engine.settings if self._copied is None else self._copied.settings

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters of this rank, as tensors and primitives: every rank saves its own."""
        return super().state_dict() if self._copied is None else copy.deepcopy(self._copied.state)

    def __getstate__(self) -> Copied:
        """What a copy has: process groups, sinks, the trainer, the GradScaler and the model's names stay here."""
        return self._copied or Copied(
            self._engine.settings, self._planned.plan, self._timeout, self._engine.scaled, self.state_dict()
        )

    def __setstate__(self, copied: Copied) -> None:
        self._begin_unnamed(copied.plan, copied.timeout)
        self._copied = copied

    def _connect(self) -> AsyncReducer:
        """Connect a copy that is used for the first time."""
        if self._copied is None:
            raise AttributeError("the state was not made")
        engine = self._copied.connect()
        self._copied = None
        self._planned.resume()
        return engine

    def close(self) -> None:
        """End the worker thread and its connections, and close the sinks. Calling it twice is fine."""
        if self._copied is None:
            super().close()

    def __repr__(self) -> str:
        return super().__repr__() if self._copied is None else f"OkTopkState(a copy at step {self.step})"


def oktopk_hook(state: OkTopkState, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients by sparse all-reduce: the hook for DistributedDataParallel.register_comm_hook.

    1. DDP hands over a bucket as soon as backward has filled it. In a dense step its all-reduce begins at once; in
       a sparse step buckets are fused until they send enough entries (`fusion_entries`), and the worker thread
       exchanges them while backward goes on.
    2. Dense steps (the warm-up) average all entries. Sparse steps add the residual, exchange the entries that the
       algorithm selects, and keep the rest in the residual.
    3. With the last bucket of a backward pass the hook waits for all of them. Either all results are in place, or
       some rank met a non-finite number, and every rank skips the step.

    Args:
        state: the OkTopkState of the model.
        bucket: the gradients that DDP delivers.

    Returns:
        A future of the averaged bucket, done when the hook of the last bucket returns.

    Example:
        ::

            ddp_model.register_comm_hook(oktopk.OkTopkState(density=0.01), oktopk.oktopk_hook)
    """
    return state._reduce(bucket)
