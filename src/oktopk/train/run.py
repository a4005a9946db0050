"""One run on one rank: from options to a trained model, its files, and an exit code."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.algorithms import Algorithm, OkTopk, find_algorithm
from oktopk.comm import Communicator, agree, gather_json

from .checkpoint.snapshot import CheckpointError, ModelIdentity
from .checkpoint.storage import Checkpoints
from .checkpoint.weights import load_weights
from .config.options import ConfigError, TrainConfig
from .config.origins import COMMAND_LINE, ENVIRONMENT, Resolved, as_toml
from .config.plan import Plan
from .data.problems import DataError
from .folder import RunFolder, check_unused, new_name
from .launch import Place, joined
from .loop import Trainer
from .screen import say_start, summary_table
from .stop import Stop
from .tasks import Share, Source, Task
from .together import raised_by_all

log = logging.getLogger(__name__)

BAD_INPUT = (DataError, ConfigError, CheckpointError, OSError, ImportError)
"""What a user can mend: said in one sentence, without a traceback."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; code is that of the process."""

    code: int
    folder: Path
    result: dict[str, Any]


def train(resolved: Resolved, place: Place, resume: bool = False) -> Outcome:
    with joined(place, resolved.config.timeout) as comm, Stop() as stop:
        return train_rank(resolved, place, comm, stop, resume)


def train_rank(resolved: Resolved, place: Place, comm: Communicator, stop: Stop, resume: bool = False) -> Outcome:
    """A run on one of the ranks that `comm` connects."""
    with _agreed(comm, resolved):
        folder = _folder(comm, resolved.config, resume)
        task = _task(resolved.config, place)
    plan = _plan(resolved.config, task, place)
    with _writing(comm, folder, resolved) as run_folder:
        if comm.rank == 0:
            say_start(resolved, place.how, task, plan)
            _say_without_effect(resolved)
        return _fit(resolved, task, plan, run_folder, comm, stop, resume)


def _fit(
    resolved: Resolved,
    task: Task[Any],
    plan: Plan,
    folder: RunFolder,
    comm: Communicator,
    stop: Stop,
    resume: bool,
) -> Outcome:
    config = resolved.config
    identity = ModelIdentity.of(config.dnn, task.model)
    checkpoints = Checkpoints(folder.checkpoints, identity, config.keep)
    with _optimizer(config, task.model, comm) as optimizer:
        trainer = Trainer(config, task, optimizer, plan, folder, checkpoints, stop)
        optimizer.set_trainer(trainer)
        if resume:
            trainer.resume()
        # without nworkers: a run may go on with another number of ranks
        folder.write_config(Resolved(replace(config, out=folder.path, nworkers=None), resolved.origins))
        for sink in folder.open_metrics(trainer.done.step):
            optimizer.add_sink(sink)
        if not trainer.finished:
            folder.plan(plan.row())
            folder.no_result()
        ended_by = trainer.fit()
        result = _result(trainer, ended_by is None)
        folder.result(result)
    if comm.rank == 0:
        if ended_by is None:
            log.info("%s\n%s", "finished; the phases of the run:", summary_table(result["phases"]))
            log.info("the run is in %s", folder.path)
        else:
            how = f"oktopk train --resume {folder.path}"
            log.warning("%s: saved after step %d; go on with %s", ended_by.name, trainer.done.step, how)
    return Outcome(0 if ended_by is None else 128 + ended_by, folder.path, result)


@contextmanager
def _agreed(comm: Communicator, resolved: Resolved) -> Iterator[None]:
    """What goes wrong on one rank ends all of them, with the same words."""
    problem: Exception | None = None
    try:
        yield
    except BAD_INPUT as error:
        problem = error
    terms = {"the options": hashlib.sha256(as_toml(resolved).encode()).hexdigest()}
    try:
        agree(comm, terms, None if problem is None else str(problem))
    except ValueError as error:
        raise raised_by_all(problem or ConfigError(str(error))) from error


def _folder(comm: Communicator, config: TrainConfig, resume: bool) -> Path:
    """The folder that rank 0 has in mind."""
    path = config.out or Path("runs") / new_name(config)
    problem = None
    if comm.rank == 0 and not resume:
        try:
            check_unused(path)
        except (ConfigError, OSError) as error:
            problem = str(error)
    said = gather_json(comm, {"path": str(path), "problem": problem}, "folder")[0]
    if said["problem"]:
        raise ConfigError(said["problem"])
    return Path(said["path"])


def _task(config: TrainConfig, place: Place) -> Task[Any]:
    assert config.batch_size is not None
    source = Source(config.data_dir, config.min_seconds, config.augment)
    share = Share(place.rank, place.world, config.batch_size, config.nsteps_update, config.seed)
    torch.manual_seed(config.seed)
    task = config.workload.build(source, share)
    if config.pretrain is not None:
        load_weights(task.model, config.pretrain)
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        task.model.cuda()
    torch.manual_seed(config.seed * 1_000_003 + place.rank)  # from here on ranks draw different numbers
    return task


def _plan(config: TrainConfig, task: Task[Any], place: Place) -> Plan:
    assert config.max_epochs is not None
    return Plan(
        steps_per_epoch=task.steps_per_epoch,
        max_epochs=config.max_epochs,
        max_steps=config.max_steps,
        warmup_steps=config.warmup_steps,
        algorithm=config.algorithm,
        density=config.density,
        parameters=sum(parameter.numel() for parameter in task.model.parameters()),
        world=place.world,
        ramp_steps=config.ramp_steps,
        ranks_per_host=config.ranks_per_host,
    )


@contextmanager
def _writing(comm: Communicator, path: Path, resolved: Resolved) -> Iterator[RunFolder]:
    """The run's folder, which rank 0 can write to: if it cannot, all ranks end."""
    with _agreed(comm, resolved):
        folder = RunFolder(path, comm.rank == 0)
    with closing(folder):
        try:
            yield folder
        except Exception:
            if comm.rank == 0 and list(folder.checkpoints.glob("*/manifest.json")):
                log.warning("what was saved is not lost: oktopk train --resume %s", path)
            raise


def _optimizer(config: TrainConfig, model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    momentum = {} if config.workload.momentum is None else {"momentum": config.momentum_after}
    made = config.workload.optimizer(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay, **momentum
    )
    return DistributedOptimizer(
        made,
        model=model,
        compressor=_algorithm(config),
        density=config.density,
        warmup_steps=config.warmup_steps,
        norm_clip=config.norm_clip,
        comm=comm,
        backward_passes=config.nsteps_update,
        auto=config.auto,
        ramp_steps=config.ramp_steps,
        momentum=(config.momentum or 0.0) if config.momentum_correction else 0.0,
        values=config.values,
        join=config.join,
        max_skipped=config.max_skipped,
        ranks_per_host=config.ranks_per_host,
    )


def _algorithm(config: TrainConfig) -> Algorithm:
    algorithm = find_algorithm(config.algorithm)
    if isinstance(algorithm, OkTopk):
        algorithm = replace(algorithm, tau=config.tau or algorithm.tau)
        algorithm = replace(algorithm, tau_prime=config.tau_prime or algorithm.tau_prime)
    return algorithm


def _say_without_effect(resolved: Resolved) -> None:
    """Options that were set and change nothing."""
    config, workload = resolved.config, resolved.config.workload
    idle = {"sigma_scale": "it had none in the original either"}
    if config.algorithm != "oktopk":
        idle |= dict.fromkeys(("tau", "tau_prime"), f"{config.algorithm} has no such constant")
    if config.algorithm == "dense":
        names = ("density", "warmup_steps", "ramp_steps", "values", "auto")
        idle |= dict.fromkeys(names, "the run is dense")
    if not config.compression:
        idle["compressor"] = "--compression is False"
    if workload.dataset != "an4":
        idle |= dict.fromkeys(("min_seconds", "pseudo_accuracy"), f"{workload.dataset} is not speech")
    if workload.dataset in ("ptb", "text"):
        idle["augment"] = "words are not changed"
    if workload.momentum is None:
        own = f"the optimizer of {workload.dnn} has its own"
        idle |= dict.fromkeys(("momentum", "momentum_correction"), own)
    if not torch.cuda.is_available():
        idle["nwpernode"] = "there is no GPU to choose"
    for name, reason in idle.items():
        if resolved.origins[name].startswith((COMMAND_LINE, ENVIRONMENT)):
            log.warning("--%s has no effect: %s", name.replace("_", "-"), reason)


def _result(trainer: Trainer, finished: bool) -> dict[str, Any]:
    """The figures of the run, for programs."""
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
    }


__all__ = ["BAD_INPUT", "Outcome", "train", "train_rank"]
