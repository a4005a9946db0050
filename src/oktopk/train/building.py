"""Build what a run trains: the task of a rank, and the torch optimizer of its model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .checkpoint.weights import load_weights
from .config.options import TrainConfig
from .tasks import DataSource, Shard, Task


def build_task(config: TrainConfig, rank: int, world: int, local_rank: int = 0) -> Task[Any]:
    """Build the task of one rank; all ranks start with the same weights.

    Args:
        config: the options of the run.
        rank: this rank.
        world: the number of ranks, which share the data.
        local_rank: the number of this rank on its host, which chooses the GPU.
    """
    assert config.batch_size is not None
    source = DataSource(config.data_dir, config.min_seconds, config.augment)
    share = Shard(rank, world, config.batch_size, config.nsteps_update, config.seed)
    torch.manual_seed(config.seed)
    task = config.workload.build(source, share)
    if config.pretrain is not None:
        load_weights(task.model, config.pretrain)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        task.model.cuda()
    torch.manual_seed(config.seed * 1_000_003 + rank)  # from here on ranks draw different numbers
    return task


def build_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """Build the workload's torch optimizer for a model."""
    momentum = {} if config.workload.momentum is None else {"momentum": config.momentum_after}
    return config.workload.optimizer(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay, **momentum
    )
