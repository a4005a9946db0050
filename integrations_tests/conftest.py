"""Set up once per session: kernels that are compiled already, and frameworks that talk to nobody."""

from __future__ import annotations

import os

import pytest
import torch

import oktopk

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_AUTH_MODE": "disabled",  # or Ray writes a token to the home folder; its node has a loopback address
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}


def pytest_configure() -> None:
    os.environ.update(OFFLINE)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before xdist starts its workers, which find what has been compiled here, as do the processes of tests."""
    if not session.config.option.collectonly:
        torch.set_num_threads(1)
        oktopk.run_threads(2, lambda comm: oktopk.sparse_allreduce(torch.ones(100), 0.1, comm=comm))
