"""FsdpState: sparse all-reduce between the replicas of a model that FSDP2 shards."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import Unpack

from ...algorithms import Algorithm
from ...comm import Communicator, checking_together
from ...comm.broadcast import broadcast_tensors
from ...engine.async_reducer import AsyncReducer, Scaler
from ...engine.settings import Density, Options, Settings
from ...metrics.events import MetricsSink
from ..base import FrontEnd, check_momentum, check_sinks, check_supported, describe, warn_adaptive
from ..watching import GuardHandle, OptimizerGuard, unwrap
from .checkpoint import prepare_loading, read_mesh_state, save_mesh_state
from .gradients import ShardedGradients
from .ranks import MeshRanks, local
from .units import backward_under_way, find_sums, find_units, model_problem

_ONCE = "every FsdpState has one model: make another one for this"


class FsdpState(FrontEnd):
    """Averages the gradients of an FSDP2 model between its replicas by sparse all-reduce with error feedback.

    FSDP shards the model inside each replica (a node), over mesh["shard"], and averages gradients there. This
    state averages them between replicas: each rank exchanges its shards with the same shards of other replicas,
    one FSDP unit after the other, while backward goes on. When backward returns, gradients are means. Whether a
    step is skipped, dense or sparse is decided by all ranks of the mesh together.

    All ranks of the mesh make theirs together.

    Args:
        mesh: the whole device mesh, with a dimension between replicas and at least one inside of them.
        algorithm: a name of `oktopk.ALGORITHMS`, or an algorithm object.
        density: share of its shards' entries that each rank sends in a sparse step, by default 1 %; "auto" to
            choose it by measurement, within a `budget`; or pairs (step, density), such as the `schedule` of
            another run.
        warmup_steps: number of dense steps before the sparse phase. By default 128 if you pass a density, else a
            share of `total_steps`: 1 %, and 8 % more in which the density falls from 25 %.
        replicate: the name of the mesh's dimension between replicas; by default "replicate" or "dp_replicate".
        auto: measure dense and sparse steps, and use the faster way.
        norm_clip: scale this replica's gradient down to this norm before it is compressed.
        grad_scaler: the GradScaler whose scale the gradients have.
        trainer: an object that gets the lists `sparsities`, `compression_ratios` and `communication_sizes`, with
            one entry per step.
        sinks: where the metrics of every step go: those of this rank's shards.
        timeout: seconds that a rank that is alive may keep others waiting; by default the process group's own.
        **options: the other fields of `oktopk.Settings`, but for `ranks_per_host`.

    Example:
        Two nodes of eight GPUs::

            mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
            for block in model.blocks:
                fully_shard(block, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
            state = oktopk.FsdpState(mesh, density=0.01).register(model, optimizer)
    """

    def __init__(
        self, mesh: DeviceMesh, algorithm: str | Algorithm = "oktopk", density: Density | None = None,
        warmup_steps: int | None = None, *, replicate: str | None = None, auto: bool = True,
        norm_clip: float | None = None, grad_scaler: Scaler | None = None, trainer: Any = None,
        sinks: Iterable[MetricsSink] = (), timeout: float | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        self._ranks = MeshRanks.of(mesh, replicate)
        comm, whole = self._ranks.connect(timeout)
        with ExitStack() as stack:
            terms: dict[str, object] = {}
            for ranks in filter(None, (whole, comm)):  # both are closed if one of them disagrees
                terms = stack.enter_context(checking_together(ranks, owned=True))
            settings = Settings.from_options(algorithm, density, warmup_steps, norm_clip, auto, options)
            if settings.ranks_per_host > 1:
                raise ValueError("FsdpState has no ranks_per_host: FSDP averages inside a replica. Leave it out")
            if norm_clip is not None and len(self._ranks.shape) > 2:
                raise ValueError(
                    "norm_clip needs a mesh of two dimensions: clip_grad_norm_() after backward instead"
                )
            checked = check_sinks(sinks, trainer)
            terms |= settings.terms() | {"mesh": self._ranks.mesh.mesh.tolist(), "replicate": self._ranks.name}
        self._held = AsyncReducer(
            settings, comm, owns_comm=True, grad_scaler=grad_scaler, sinks=checked, whole=whole
        )
        self._guard = OptimizerGuard(lambda: self.skipped, self._held.notice_scaler)
        self._model: nn.Module | None = None
        self._handles: dict[str, RemovableHandle] = {}
        self._lock = threading.Lock()  # with several devices, hooks run in several threads
        self._syncing = True
        self._pass: int | None = None
        """The backward pass that is under way, as autograd numbers it."""

    @property
    def step(self) -> int:
        """How many steps have been averaged, skipped ones included."""
        return self._engine.step

    @property
    def schedule(self) -> list[tuple[int, float | None]]:
        """The density of every step so far, as pairs (step, density) from that step on; None is dense."""
        return self._engine.schedule

    def register(self, model: nn.Module, optimizer: Optimizer | None = None) -> FsdpState:
        """Average this model's gradients from now on; its replicas start as replica 0.

        Args:
            model: the model that fully_shard was called on, over one replica's part of the mesh; one per state.
            optimizer: the optimizer to guard(), or None.

        Returns:
            The state itself.
        """
        named = dict(getattr(model, "named_parameters", dict)())
        with self._engine.checking_together() as terms:
            if self._model is not None:
                raise ValueError(_ONCE)
            if problem := model_problem(model, self._ranks):
                raise TypeError(problem)
            check_supported(named.items(), model)
            if optimizer is not None:
                check_momentum(self._engine.settings, unwrap(optimizer))
            units = find_units(model)
            terms |= describe({name: local(p) for name, p in named.items() if p.requires_grad}) | {"units": units}
        self._model, self._gradients = model, ShardedGradients(named, units)
        tensors = {name: local(tensor) for name, tensor in (*named.items(), *model.named_buffers())}
        self._engine.run(lambda replicas: broadcast_tensors(replicas, tensors), replicas=True)
        self._listen()
        if optimizer is not None:
            self.guard(optimizer)
        self._engine.plan(sum(p.numel() for p in named.values() if p.requires_grad))
        return self

    def guard(self, optimizer: Optimizer) -> GuardHandle:
        """Make skipped steps exact: the optimizer then finds no gradients, and changes nothing.

        An unguarded optimizer sees zero gradients: its momentum and weight decay still act. Until a guarded one
        has stepped it sees NaN, because a GradScaler may be at work: guard all optimizers of the model.

        Args:
            optimizer: a torch optimizer, or a wrapper such as Accelerate's.

        Returns:
            A handle whose remove() ends the guard.
        """
        optimizer = unwrap(optimizer)
        check_momentum(self._engine.settings, optimizer)
        warn_adaptive(self._engine.settings, optimizer, self._ranks.mesh.get_rank())
        return self._guard.watch(optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose backward passes only accumulate: all micro-batches of a step but the last.

        Example:
            ::

                with state.no_sync():
                    loss(model, first).backward()
                loss(model, second).backward()      # exchanges the sum of both
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # Gradients, as backward delivers them.

    def _listen(self) -> None:
        """Hear of gradients. Parameters that are unfrozen later are averaged at the end of a pass at first."""
        listener = weakref.ref(self)  # parameters outlive a state that is thrown away
        for name, parameter in self._gradients.parameters.items():
            if name in self._handles or not parameter.requires_grad:
                continue

            def arrived(_: Tensor, name: str = name) -> None:
                state = listener()
                if state is not None and state._syncing:
                    state._report_errors(state._arrived, name)

            self._handles[name] = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def _report_errors(self, job: Any, *args: Any) -> None:
        """An error is raised here, in the middle of backward(), and on all ranks."""
        engine = self._engine
        try:
            with engine.uninterrupted(), self._lock:
                job(*args)
        except Exception as error:
            engine.give_up(error)

    def _arrived(self, name: str) -> None:
        self._begin()
        self._gradients.add(name)
        if self._engine.settings.norm_clip is None:  # otherwise the norm of all gradients is needed first
            self._gradients.submit_complete(self._engine)

    def _begin(self) -> None:
        """The first gradient of a backward pass: this state finishes the step when FSDP has finished its own."""
        number = torch._C._current_graph_task_id()
        if number == self._pass:
            return
        if number < 0:
            raise RuntimeError(
                "FSDP has reduced gradients outside of a backward pass, as pipeline schedules let it do: "
                "FsdpState does not work with them"
            )
        self._engine.abandon()  # a pass that has failed in the middle
        self._engine.await_scaler(self._guard.waits)
        self._guard.check()
        if self._guard.handles and not self._guard.applied:
            self._agree_unapplied()
        self._gradients.expect()
        self._pass = number
        self._finish_later(1)

    def _finish_later(self, again: int) -> None:
        Variable._execution_engine.queue_callback(lambda: self._report_errors(self._end, again))

    def _end(self, again: int) -> None:
        """Finish the step, at the end of the backward pass."""
        assert self._model is not None
        if backward_under_way(self._model):
            if not again:
                raise RuntimeError(
                    "FSDP has not ended this backward pass: checkpoint activations with use_reentrant=False, and "
                    "call model.reset_iter_state() after a pass that has failed"
                )
            self._finish_later(again - 1)  # a unit without a common root ends later than the others
            return
        self._pass = None
        gradients = self._gradients
        factor = self._engine.clip_factor(gradients.local_grads(), self._combine_norms)
        gradients.submit_rest(self._engine, factor)
        self._engine.finish()
        gradients.scale(find_sums(self._model), self._ranks.replicas)  # over a replica, so over replicas, too
        gradients.flats = {}
        self._listen()
        self._guard.applied = self.skipped

    def _combine_norms(self, norm: float) -> float:
        """The norm of this replica's gradient, from those of its shards."""

        def gather(comm: Communicator) -> dict[int, float]:
            norms = comm.all_gather_sealed(torch.tensor([norm], dtype=torch.float64), 8, "norms of shards")
            return {comm.global_rank(rank): float(theirs) for rank, theirs in enumerate(norms)}

        if len(self._ranks.replica) == 1:
            return norm
        norms = self._engine.run(gather, counted=True)
        return math.hypot(*(norms[rank] for rank in self._ranks.replica))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Residuals, thresholds and counters for torch.distributed.checkpoint, between steps. All ranks save it.

        Example:
            ::

                dcp.save({"model": model.state_dict(), "oktopk": state.state_dict()}, checkpoint_id=folder)
                state.load_checkpoint(folder)       # on this mesh or on another one
        """
        registered = self._registered()
        momentum = self._engine.settings.momentum > 0
        return save_mesh_state(self._engine.state_dict(), registered.parameters, self._ranks, momentum)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state_dict() that torch.distributed.checkpoint has filled on this mesh.

        Args:
            state_dict: of the same mesh; load_checkpoint() also reads that of another one.
        """
        with self._engine.checking_together():
            parameters = self._registered().parameters
            sizes = {name: local(p).numel() for name, p in parameters.items()}
            apply = self._engine.read_state_dict(read_mesh_state(state_dict, parameters, self._ranks), sizes)
        apply()
        self._guard.reset()
        self._pass = None

    def load_checkpoint(self, checkpoint: str | os.PathLike[str] | StorageReader, key: str = "oktopk") -> None:
        """Go on from a checkpoint of this mesh, to the bit, or of one with other replicas or shards.

        Another number of replicas gets the mean of the old residuals, so that their sum, divided by the number of
        replicas, is what it was. All ranks of torch.distributed call it together, after register().

        Args:
            checkpoint: the folder that torch.distributed.checkpoint has saved to, or a StorageReader.
            key: under which name the state_dict() was saved there.
        """
        parameters = self._registered().parameters
        with self._engine.checking_together():
            read = prepare_loading(checkpoint, key, parameters, self._ranks)
        self.load_state_dict(read())

    def _registered(self) -> ShardedGradients:
        if self._model is None:
            raise RuntimeError("call register(model) first: checkpoints are by parameter")
        return self._gradients

    def abandon(self) -> None:
        """Give up a step whose backward pass has failed, on all ranks: what was sent returns to the residuals."""
        with self._engine.uninterrupted():
            self._engine.abandon()
            self._pass = None

    def close(self) -> None:
        """Remove the hooks, end the worker thread and its connections, and close the sinks. Twice is fine."""
        for handle in self._handles.values():
            handle.remove()
        super().close()
