"""LocalOptimizer: every rank runs its own optimizer, and what it would add to the parameters is averaged."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import Unpack

from ..algorithms import Algorithm
from ..comm import Communicator, agree, checking_together, exclusive_communicator
from ..engine.async_reducer import AsyncReducer, Scaler
from ..engine.settings import UPDATES, Density, Options, Settings
from ..feedback.buckets import DEFAULT_BUCKET_MB, Bucket, BucketPlan
from ..metrics.events import MetricsSink, StepEvent
from .amp import AmpScaler, find_nonfinite, lower_scale
from .base import check_sinks, choose_algorithm, is_adaptive
from .fsdp.ranks import MeshRanks, local
from .updates import LocalUpdates, average_state
from .wrapped import WrappedOptimizer

_log = logging.getLogger(__name__)

MOST_LR_SCALE = 2.0
"""Of the default for adaptive optimizers: √ranks has been measured on 2 and 4 ranks."""
_REFUSED = {
    "momentum": "momentum correction is for gradients, and updates have the optimizer's momentum: leave it out",
    "norm_clip": "call clip_grad_norm_(model.parameters(), …) before step(), which clips this rank's gradient",
    "backward_passes": "gradients accumulate until step(), after any number of backward passes: leave it out",
}


class LocalOptimizer(WrappedOptimizer):
    """Any torch optimizer, run by every rank on its own gradients; the sparse mean of its updates is applied.

    Use it for adaptive optimizers such as AdamW: sparse gradients arrive in bursts, which spoil their second
    moments; updates do not. It is the case H = 1 of local SGD, with error feedback on the pseudo-gradients as in
    SparseLoCo; `sync_every` is H. A step:

    1. All ranks agree that all gradients are finite, in one small round. If not, all ranks skip the step:
       parameters, optimizer state and residuals stay as they are.
    2. The optimizer steps with this rank's gradients: update = θ_now − θ_start.
    3. Residual + update is compressed and averaged. θ_common + mean is the same on all ranks, to the bit.

    The parameters of a rank are θ_common + its own residual: the next gradient already sees what this rank has not
    sent yet, and corrects it. Without that, updates that wait add up to noise. **Call synchronize() before you
    validate, save or change parameters**: it gives this rank θ_common, and needs no communication between rounds.

    Clip this rank's gradients before step(). Decoupled weight decay (AdamW, Muon, Adafactor, and groups with
    decoupled_weight_decay=True) acts on all parameters, is the same on all ranks, and is not compressed.
    Coupled weight decay (SGD) is a part of the update. Moments belong to this rank: every rank saves its own
    state_dict(). A closure is called once, and its loss is this rank's own.

    It is an Optimizer itself: schedulers, param_groups and state_dict work, and so does GradScaler.step(). Run
    backward of a DistributedDataParallel model under no_sync(): the gradients must be this rank's own.

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: pairs of name and parameter, all that the optimizer has; by default those of `model`.
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object.
        density: share of entries that each rank sends in a sparse step, by default 1 %.
        warmup_steps: number of dense exchanges before the sparse phase. By default 128 if you pass a density, else
            a share of `total_steps`: 1 %, and 8 % more in which the density falls from 25 %.
        model: the model, whose parameters give the names; its buffers start as those of rank 0, too.
        comm: the ranks; by default those of torch.distributed, over connections of its own.
        sync_every: number of local steps between exchanges (H). Between them parameters differ from rank to rank;
            a rank whose gradients are not finite leaves out its own step, and if it has left out all of a round,
            all ranks skip that round.
        average_state_every: number of exchanges after which `averaged_state` is averaged densely; None is never.
        averaged_state: names of optimizer state that is averaged then.
        lr_scale: factor of the learning rate in local steps. None is √ranks, at most 2, for adaptive optimizers,
            and 1 for others: the second moment of one rank's gradients has more noise than that of their mean,
            and shortens the update. Weight decay and param_groups are not scaled.
        local_parameters: whether parameters hold this rank's residual; if not, they are θ_common after a round. It
            has no effect on parameters of 16 bits, which would round it, and with `ranks_per_host`.
        broadcast: whether all ranks start with the parameters of rank 0.
        buckets: "model" for one bucket (the paper's k of the whole model), a size in MB, or lists of names.
        auto: measure dense and sparse steps, and use the faster way.
        grad_scaler: the GradScaler whose step() is called with this optimizer.
        trainer: an object whose lists of metrics are filled; see set_trainer().
        sinks: where the metrics of every exchange go.
        timeout: seconds that a rank that is alive may keep others waiting; by default the process group's own.
        compressor: another name for `algorithm`.
        mesh: the whole device mesh of a model that FSDP2 shards over mesh["shard"]: replicas then average the
            updates of their shards; see FsdpState.
        **options: the other fields of `oktopk.Settings`, but for `momentum` and `norm_clip`.

    Example:
        >>> import torch, oktopk
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> with oktopk.LocalOptimizer(inner, model=model, density=0.01) as optimizer:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)    # of this rank's gradient
        ...     optimizer.step()                                                  # steps, and averages the update
        ...     event = optimizer.synchronize()                                   # before model.state_dict()
        >>> optimizer.skipped
        False
    """

    _step_supports_amp_scaling = True  # a GradScaler lets step() decide, which does so for all ranks

    def __init__(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        algorithm: str | Algorithm = "oktopk", density: Density | None = None, warmup_steps: int | None = None, *,
        model: nn.Module | None = None, comm: Communicator | None = None, sync_every: int = 1,
        average_state_every: int | None = None, averaged_state: Sequence[str] = ("exp_avg_sq",),
        lr_scale: float | None = None, local_parameters: bool = True, broadcast: bool = True,
        buckets: BucketPlan = DEFAULT_BUCKET_MB, auto: bool = True, grad_scaler: Scaler | None = None,
        trainer: Any = None, sinks: Iterable[MetricsSink] = (), timeout: float | None = None,
        compressor: str | Algorithm | None = None, mesh: DeviceMesh | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        self._mesh = None if mesh is None else MeshRanks.of(mesh)
        ranks, whole = self._connect_ranks(comm, timeout)
        with ExitStack() as stack:
            if whole is not None:
                stack.enter_context(checking_together(whole, owned=True))
            terms = stack.enter_context(checking_together(ranks, owned=comm is None))
            if isinstance(optimizer, LBFGS):
                raise TypeError("LBFGS searches along gradients of all ranks: use oktopk.DistributedOptimizer")
            _check_count("sync_every", sync_every)
            if average_state_every is not None:
                _check_count("average_state_every", average_state_every)
            if isinstance(averaged_state, str) or not all(isinstance(key, str) for key in averaged_state):
                raise ValueError(f"averaged_state must be names such as ['exp_avg_sq'], got {averaged_state!r}")
            chosen = choose_algorithm(algorithm, compressor)
            accepted = _accepted(options)
            if type(steps := accepted.get("total_steps")) is int:  # the engine counts exchanges
                accepted["total_steps"] = math.ceil(steps / sync_every)
            settings = Settings.from_options(chosen, density, warmup_steps, None, auto, accepted)
            network = model.module if isinstance(model, DistributedDataParallel) else model
            if self._mesh is not None:
                self._check_sharded(model, self._mesh)
                if settings.ranks_per_host > 1:
                    raise ValueError("mesh= has no ranks_per_host: FSDP averages inside a replica. Leave it out")
            terms |= settings.terms() | self._wrap(optimizer, named_parameters, network, buckets, torch.float32)
            terms |= {"sync_every": sync_every, "average_state_every": average_state_every, "broadcast": broadcast}
            terms |= {"averaged_state": list(averaged_state), "local_parameters": local_parameters}
            scale = _default_scale(optimizer, ranks.world) if lr_scale is None else lr_scale
            if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < math.inf:
                raise ValueError(f"lr_scale must be None or a number above 0, got {lr_scale!r}")
            terms |= {"lr_scale": scale}
            checked = check_sinks(sinks, trainer)
        self._held = AsyncReducer(
            settings, ranks, owns_comm=comm is None, sinks=checked, averages=UPDATES, whole=whole
        )
        self._held.plan(self._gradients.size)
        self.sync_every = sync_every
        self._average_state_every, self._averaged_state = average_state_every, tuple(averaged_state)
        self._scaler = cast("AmpScaler | None", grad_scaler)
        self._updates = LocalUpdates(self._held.residual if local_parameters else _nothing, scale)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        if self._ddp is not None:
            self._ddp.require_forward_param_sync = False  # a forward pass whose gradients it averages sets it
        if broadcast:
            self.broadcast(network)

    def _connect_ranks(
        self, comm: Communicator | None, timeout: float | None
    ) -> tuple[Communicator, Communicator | None]:
        """The ranks that exchange, and the whole mesh if that is more."""
        if self._mesh is None:
            return exclusive_communicator(timeout) if comm is None else comm, None
        if comm is not None:
            raise ValueError("mesh= has its own connections: leave out comm=")
        return self._mesh.connect(timeout)

    @staticmethod
    def _check_sharded(model: nn.Module | None, ranks: MeshRanks) -> None:
        from .fsdp.units import model_problem  # imports FSDP, which takes its time

        if problem := model_problem(model, ranks):
            raise TypeError(problem)

    @property
    def rank(self) -> int:
        """The number of this rank; of a mesh, among all of its ranks."""
        return super().rank if self._mesh is None else int(self._mesh.mesh.get_rank())

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let this rank's optimizer step; every `sync_every` steps, average what it added to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._engine.uninterrupted(), torch.no_grad():
            self._begin()
            nonfinite = find_nonfinite(self, self._scaler, self._grads())
            reasons = [] if self._updates.taken else nonfinite
            ends = self._updates.steps + 1 >= self.sync_every
            if ends and not self._agree(reasons):
                self._skip(reasons)
            else:
                self._step_locally(nonfinite)
                if ends:
                    self._exchange()
        return loss

    def synchronize(self) -> StepEvent | None:
        """Give all ranks the same parameters, to validate or save; ends a round of local steps early.

        Call it on all ranks. Residuals stay, and the next step adds them to the parameters again.
        """
        if self._updates.steps:
            with self._engine.uninterrupted(), torch.no_grad():
                reasons = [] if self._updates.taken else ["all local steps"]
                if self._agree(reasons):
                    self._exchange()
                else:
                    self._skip(reasons)
        self._move_to_common()
        return self.last

    def _move_to_common(self) -> None:
        with self._engine.uninterrupted(), torch.no_grad():
            self._updates.move_to_common()

    def localize(self) -> None:
        """Give the parameters this rank's residual again, after synchronize() or after a checkpoint was loaded.

        The next step does that by itself. If it is called before the gradient of that step is computed, training
        goes on to the bit as if nothing had been saved.
        """
        if not self._updates.steps:
            with self._engine.uninterrupted(), torch.no_grad():
                self._begin_round()
                self._updates.move_to_local()

    def _begin(self) -> None:
        self._check_known()
        if self._ddp is not None and self._ddp.require_forward_param_sync:
            raise RuntimeError(
                "DistributedDataParallel has averaged these gradients: run forward and backward under "
                "model.no_sync(), or use oktopk.OkTopkState"
            )
        if not self._updates.steps:
            self._refresh_parts()
            if self._gradients.follow(self._engine):
                self._updates.move_to_common()  # what is frozen now stays there
        for name in self._named.keys() - set(self._gradients.names):  # frozen: it stays where it is
            self._named[name].grad = None

    def _refresh_parts(self) -> None:
        """Follow what FSDP or the user did to a sharded model: parts are tensors of their own, in its memory."""
        if self._mesh is not None:
            for name, part in self._parts.items():
                part.data = self._part(self._named[name])
                part.requires_grad_(self._named[name].requires_grad)

    def _part(self, tensor: Tensor) -> Tensor:
        if self._mesh is None:
            return tensor
        part = local(tensor)
        return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part

    def _grads(self) -> dict[str, Tensor]:
        """This rank's own gradients by name, as far as there are any."""
        grads = {name: self._named[name].grad for name in self._gradients.names}
        return {name: self._part(grad) for name, grad in grads.items() if grad is not None}

    def _agree(self, reasons: Sequence[str]) -> bool:
        """Ask all ranks, in one small round, whether each has an update; `reasons` are why this one has none.

        They also compare weight decay, which each of them applies by itself.
        """
        digest, factors = self._updates.describe_decay(self.inner)

        def ask(comm: Communicator) -> bool:
            answers = comm.all_gather_ints([len(reasons), digest], "local steps")
            if any(theirs != digest for _, theirs in answers):
                agree(comm, {"learning rate and weight decay (1 - lr * weight_decay by group)": factors})
            return not any(count for count, _ in answers)

        return self._engine.run(ask, counted=True)

    def _step_locally(self, nonfinite: Sequence[str]) -> None:
        if not self._updates.steps:
            self._begin_round()
        if nonfinite:
            where = ", ".join(nonfinite[:5])
            _log.warning("oktopk: rank %d leaves out a local step: non-finite gradients in %s", self.rank, where)
        try:
            self._updates.step(self.inner, not nonfinite)
        except Exception as error:
            self._updates.restore()
            self._engine.give_up(error)  # the other ranks wait for this one's update

    def _begin_round(self) -> None:
        named = {name: self._named[name] for name in self._gradients.names}
        self._updates.begin(named, self._parts, self._gradients.buckets, self.inner)

    def _exchange(self) -> None:
        """Average the updates of all ranks, and apply the mean; a skipped or failed step leaves θ_common."""
        engine, updates = self._engine, self._updates
        try:
            if self._average_state_every and (engine.step + 1) % self._average_state_every == 0:
                engine.run(self._average_state, counted=True, replicas=True)
            for bucket in self._gradients.buckets:
                self._gradients.submit_filled(engine, bucket, partial(updates.write, bucket))
            engine.finish()
        except Exception:
            updates.restore()
            raise
        if engine.skipped:
            updates.restore()
            return
        updates.apply(self._gradients.flat)

    def _average_state(self, comm: Communicator) -> None:
        states = {
            name: {
                key: self._part(value) if isinstance(value, Tensor) else value
                for key, value in self.inner.state[parameter].items()
            }
            for name, parameter in self._named.items()
            if parameter in self.inner.state
        }
        for key in self._averaged_state:
            average_state(comm, self._gradients, states, key, type(self.inner).__name__)

    def _skip(self, reasons: Sequence[str]) -> None:
        """Skip the step on all ranks. The engine counts, reports and, after `max_skipped`, raises it."""
        self._updates.restore()
        self._engine.skip_next(reasons, lower_scale(self, self._scaler))
        for bucket in self._gradients.buckets:
            self._gradients.submit_filled(self._engine, bucket, Tensor.zero_)
        self._engine.finish()

    # What an optimizer does.

    def _check_between_steps(self, what: str) -> None:
        if self._updates.steps:
            raise RuntimeError(f"a round of local steps is under way: call synchronize() before you {what}")

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's of this rank, and under "oktopk" its residuals: every rank saves its own.

        Call synchronize() first, so that the parameters are those of all ranks.
        """
        if self._updates.apart:
            raise RuntimeError(
                "the parameters hold updates of this rank alone: call synchronize() on all ranks before you save"
            )
        return super().state_dict()

    def broadcast(self, model: nn.Module | None = None) -> None:
        """Give all ranks the parameters that rank 0 has in common with them, and the buffers of a model."""
        self._check_between_steps("broadcast")
        self._move_to_common()
        super().broadcast(model)

    def close(self) -> None:
        """End the worker thread and its connections, and close the sinks; parameters are those of all ranks.

        A round of local steps that is under way stays as it is: call synchronize() before.
        """
        if not self._updates.steps:
            self._move_to_common()
        super().close()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from this rank's state_dict(); one of a plain optimizer will do, then residuals start at zero.

        Args:
            state_dict: of the same rank and number of ranks; see `oktopk.redistribute` for another number.
        """
        if self._updates.apart:
            raise RuntimeError(
                "the parameters hold updates of this rank alone: call synchronize() on all ranks, load the model, "
                "then the optimizer"
            )
        super().load_state_dict(state_dict)
        self._updates.forget()


def _default_scale(optimizer: Optimizer, ranks: int) -> float:
    return min(math.sqrt(ranks), MOST_LR_SCALE) if is_adaptive(optimizer) else 1.0


def _nothing(_: Bucket) -> None:
    """No residual that parameters could hold."""


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _accepted(options: Options) -> Options:
    """The options; a ValueError for those that are of no use here."""
    given = dict(options)
    for name, remedy in _REFUSED.items():
        if given.pop(name, None):
            raise ValueError(f"LocalOptimizer has no {name}: {remedy}")
    return cast(Options, given)
