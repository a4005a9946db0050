"""Run the training on one rank: from options to a trained model, its files, and an exit code."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer

from oktopk import DistributedOptimizer, LocalOptimizer
from oktopk.algorithms import Algorithm, OkTopk, find_algorithm
from oktopk.comm import Communicator, agree, gather_json
from oktopk.engine.settings import AUTO, GRADIENTS, UPDATES
from oktopk.engine.voice.speaking import COMPILING, hushed
from oktopk.kernels import must_compile

from .building import build_optimizer, build_task
from .checkpoint.snapshot import CheckpointError, ModelIdentity
from .checkpoint.storage import Checkpoints
from .collective_errors import mark_collective
from .config.kinds import format_schedule
from .config.options import COMMAND_LINE, ENVIRONMENT, ConfigError, TrainConfig
from .config.origins import ResolvedConfig, to_toml
from .config.plan import Plan
from .console import format_summary, log_start
from .data.problems import DataError
from .launch import RankInfo, connect
from .loop import Trainer
from .rehearsal import AnyOptimizer, rehearse
from .run_folder import RunFolder, check_folder, new_name
from .sharded import ShardedOptimizer, make_mesh, shard_model
from .stop import Stop
from .tasks import Task

log = logging.getLogger(__name__)

BAD_INPUT = (DataError, ConfigError, CheckpointError, OSError, ImportError)
"""Errors that the user can fix: shown in one line, without a traceback."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `code` is the exit code."""

    code: int
    folder: Path
    result: dict[str, Any]


def train(resolved: ResolvedConfig, info: RankInfo, resume: bool = False) -> Outcome:
    """Connect the ranks and train; Ctrl-C and SIGTERM stop the run after the current step."""
    with connect(info, resolved.config.timeout) as comm, Stop() as stop:
        return train_rank(resolved, info, comm, stop, resume)


def train_rank(
    resolved: ResolvedConfig, info: RankInfo, comm: Communicator, stop: Stop, resume: bool = False
) -> Outcome:
    """Train on one of the ranks that `comm` connects."""
    with _agree_on_errors(comm, resolved):
        _check_combinations(resolved.config, info)
        folder = _choose_folder(comm, resolved.config, resume)
        task = build_task(resolved.config, info.rank, info.world, info.local_rank)
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    plan = Plan.of(resolved.config, task.steps_per_epoch, parameters, info.world)
    with _open_folder(comm, folder, resolved, resume) as run_folder:
        with _agree_on_errors(comm, resolved):
            run_folder.open_sinks(resolved.config.sinks)
        if comm.rank == 0:
            log_start(resolved, info.launcher, task, plan)
            _warn_unused_options(resolved)
            if info.local_world % resolved.config.shard:
                log.warning(
                    "--shard %d: a host has %d ranks, so that shards are gathered over the network",
                    resolved.config.shard,
                    info.local_world,
                )
        return _fit(resolved, task, plan, run_folder, comm, stop, resume)


def _fit(
    resolved: ResolvedConfig,
    task: Task[Any],
    plan: Plan,
    folder: RunFolder,
    comm: Communicator,
    stop: Stop,
    resume: bool,
) -> Outcome:
    config = resolved.config
    identity = ModelIdentity.of(config.dnn, task.model, config.shard)
    checkpoints = Checkpoints(folder.checkpoints, identity, config.keep)
    if plan.sparse_steps:
        numbered = replace(config, density=plan.densities[0])
        _compile_kernels(numbered, next(task.model.parameters()).device, comm.rank == 0)
    mesh = None
    if config.shard > 1:
        mesh = make_mesh(next(task.model.parameters()).device.type, config.shard, comm.world)
        shard_model(task.model, mesh["shard"])
    total = plan.steps if config.warmup_steps == AUTO else None
    inner = build_optimizer(config, task.model)
    with hushed():  # the plan has been logged
        optimizer = _make_optimizer(config, inner, task.model, comm, total, mesh)
    with optimizer:
        trainer = Trainer(config, task, optimizer, plan, folder, checkpoints, stop)
        optimizer.set_trainer(trainer)
        if resume:
            trainer.resume()
        # without nworkers: a run may resume with another number of ranks
        folder.write_config(ResolvedConfig(replace(config, out=folder.path, nworkers=None), resolved.origins))
        for sink in folder.open_metrics(trainer.done.step):
            optimizer.add_sink(sink)
        if not trainer.finished:
            folder.write_plan(plan.row())
            folder.remove_result()
        ended_by = trainer.fit()
        result = _result(trainer, ended_by is None)
        folder.write_result(result)
    if comm.rank == 0:
        if ended_by is None:
            log.info("finished; averages per phase:\n%s", format_summary(result["phases"], plan))
            log.info("the run is in %s", folder.path)
        else:
            command = f"oktopk train --resume {folder.path}"
            log.warning("%s: saved after step %d; continue with: %s", ended_by.name, trainer.done.step, command)
    return Outcome(0 if ended_by is None else 128 + ended_by, folder.path, result)


@contextmanager
def _agree_on_errors(comm: Communicator, resolved: ResolvedConfig) -> Iterator[None]:
    """If the block fails on one rank, raise the same error on all of them."""
    problem: Exception | None = None
    try:
        yield
    except BAD_INPUT as error:
        problem = error
    terms = {"the options": hashlib.sha256(to_toml(resolved).encode()).hexdigest()}
    try:
        agree(comm, terms, None if problem is None else str(problem))
    except ValueError as error:
        raise mark_collective(problem or ConfigError(str(error))) from error


def _check_combinations(config: TrainConfig, info: RankInfo) -> None:
    """Refuse what the reducer would refuse, in the words of the command line."""
    world = info.world
    if config.shard > 1:
        _check_sharding(config, info)
    if world % config.ranks_per_host:
        raise ConfigError(
            f"--ranks-per-host is {config.ranks_per_host}, but the number of ranks, {world}, is no multiple of it"
        )
    if config.momentum_correction and (config.momentum or 0.0) >= 1:
        raise ConfigError(f"--momentum-correction needs a --momentum below 1, got {config.momentum:g}")


def _check_sharding(config: TrainConfig, info: RankInfo) -> None:
    if info.world % config.shard:
        raise ConfigError(
            f"--shard is {config.shard}, but the number of ranks, {info.world}, is no multiple of it"
        )
    if config.ranks_per_host > 1:
        raise ConfigError("--shard averages inside a host already: leave out --ranks-per-host")
    if not dist.is_initialized():
        raise ConfigError(
            f"--shard needs torch.distributed, which {info.launcher} does not start: use --ranks or torchrun"
        )


def _choose_folder(comm: Communicator, config: TrainConfig, resume: bool) -> Path:
    """Choose the run folder; rank 0 decides for all."""
    path = config.out or Path("runs") / new_name(config)
    problem = None
    if comm.rank == 0:
        try:
            check_folder(path, resume)
        except (ConfigError, OSError) as error:
            problem = str(error)
    chosen = gather_json(comm, {"path": str(path), "problem": problem}, "folder")[0]
    if chosen["problem"]:
        raise ConfigError(chosen["problem"])
    return Path(chosen["path"])


@contextmanager
def _open_folder(comm: Communicator, path: Path, resolved: ResolvedConfig, resume: bool) -> Iterator[RunFolder]:
    """Open the run folder; if rank 0 cannot write to it, all ranks fail."""
    with _agree_on_errors(comm, resolved):
        folder = RunFolder(path, comm.rank == 0, resume)
    with closing(folder):
        try:
            yield folder
        except Exception:
            if folder.trains and list(folder.checkpoints.glob("*/manifest.json")):
                log.warning("continue from the last checkpoint with: oktopk train --resume %s", path)
            raise


def _make_optimizer(
    config: TrainConfig, inner: Optimizer, model: nn.Module, comm: Communicator, total_steps: int | None = None,
    mesh: DeviceMesh | None = None,
) -> AnyOptimizer:  # fmt: skip
    settings = _make_settings(config) | {"total_steps": total_steps}
    # The ranks of a mesh have connections of their own.
    ranks: dict[str, Any] = {"comm": comm} if mesh is None else {"mesh": mesh, "timeout": config.timeout}
    if config.average == UPDATES:
        every = config.average_state_every
        return LocalOptimizer(inner, model=model, average_state_every=every, **ranks, **settings)
    momentum = (config.momentum or 0.0) if config.momentum_correction else 0.0
    settings |= {"momentum": momentum, "norm_clip": config.norm_clip}
    if mesh is not None:
        return ShardedOptimizer(inner, model, **ranks, **settings)
    return DistributedOptimizer(inner, model=model, backward_passes=config.nsteps_update, **ranks, **settings)


def _make_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that both ways to average have in common."""
    names = (
        *("auto", "ramp_steps", "values", "fusion_entries", "max_skipped", "ranks_per_host"),
        *("budget", "min_density", "warmup_values"),
    )
    warmup = config.warmup_steps if isinstance(config.warmup_steps, int) else None
    settings = {name: getattr(config, name) for name in names}
    return {"algorithm": _make_algorithm(config), "density": config.densities, "warmup_steps": warmup, **settings}


def _compile_kernels(config: TrainConfig, device: torch.device, is_rank0: bool) -> None:
    """Compile what the run needs before its first step; it is announced if that will take long."""
    if is_rank0 and must_compile():
        log.info("%s", COMPILING)
    names = (
        *("compressor", "density", "values", "tau", "tau_prime", "fusion_entries", "norm_clip"),
        *("momentum", "momentum_correction", "average"),
    )
    sparse = TrainConfig(**{name: getattr(config, name) for name in names}, warmup_steps=0)
    _rehearse_once(sparse, device)


@cache
def _rehearse_once(config: TrainConfig, device: torch.device) -> None:
    """Kernels do not depend on the optimizer, so that any will do."""
    rehearse(lambda model, comm: _make_optimizer(config, SGD(model.parameters(), 0.01), model, comm), device)


def _make_algorithm(config: TrainConfig) -> Algorithm:
    algorithm = find_algorithm(config.algorithm)
    if isinstance(algorithm, OkTopk):
        algorithm = replace(algorithm, tau=config.tau or algorithm.tau)
        algorithm = replace(algorithm, tau_prime=config.tau_prime or algorithm.tau_prime)
    return algorithm


def _warn_unused_options(resolved: ResolvedConfig) -> None:
    """Warn about options that were set but have no effect."""
    config, workload = resolved.config, resolved.config.workload
    unused = {"sigma_scale": "it is accepted for compatibility only"}
    if config.algorithm != "oktopk":
        unused |= dict.fromkeys(("tau", "tau_prime"), f"{config.algorithm} has no such constant")
    if config.algorithm == "dense":
        names = (
            *("density", "warmup_steps", "ramp_steps", "values", "auto"),
            *("warmup_values", "budget", "min_density"),
        )
        unused |= dict.fromkeys(names, "the run is dense")
    elif config.density != AUTO:
        unused |= dict.fromkeys(("budget", "min_density"), "--density is not auto")
    if isinstance(config.densities, tuple):
        unused |= dict.fromkeys(("ramp_steps", "auto"), "the schedule of --density decides every step")
    if config.average == GRADIENTS:
        unused["average_state_every"] = "--average is gradients"
    if not config.compression:
        unused["compressor"] = "--compression is False"
    if workload.dataset != "an4":
        unused |= dict.fromkeys(("min_seconds", "pseudo_accuracy"), f"{workload.dataset} is not speech")
    if workload.dataset in ("ptb", "text", "tokens"):
        unused["augment"] = "text is not augmented"
    if workload.momentum is None:
        own = f"the optimizer of {workload.dnn} has its own"
        unused |= dict.fromkeys(("momentum", "momentum_correction"), own)
    if not torch.cuda.is_available():
        unused["nwpernode"] = "there is no GPU to choose"
    for name, reason in unused.items():
        if resolved.origins[name].startswith((COMMAND_LINE, ENVIRONMENT)):
            log.warning("--%s has no effect: %s", name.replace("_", "-"), reason)


def _result(trainer: Trainer, finished: bool) -> dict[str, Any]:
    """The results of the run, for programs."""
    config, plan = trainer.config, trainer.plan
    return {
        "finished": finished,
        "dnn": config.dnn,
        "dataset": config.dataset,
        "algorithm": config.algorithm,
        "density": config.density,
        "seed": config.seed,
        "world": plan.world,
        "parameters": plan.parameters,
        "steps": trainer.done.step,
        "epochs": trainer.done.epoch,
        "metric": trainer.task.metric,
        "validations": trainer.validations,
        "phases": trainer.in_run.rows(),
        "schedule": format_schedule(trainer.optimizer.schedule),
    }


__all__ = ["BAD_INPUT", "Outcome", "train", "train_rank"]
