"""Set up once per session: kernels that are compiled already, and frameworks that talk to nobody."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata

import pytest
import torch

import oktopk
from tests.support.endings import begin, pytest_terminal_summary, pytest_unconfigure  # noqa: F401

FRAMEWORKS = ("lightning", "transformers", "accelerate", "ray", "wandb", "mlflow-skinny")

OFFLINE = {
    "GLOO_SOCKET_IFNAME": "lo",  # also for oktopk's own connections
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_AUTH_MODE": "disabled",  # or Ray writes a token to the home folder; its node has a loopback address
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less to start
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # which is also how often it looks for reports
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",  # after which Ray starts again: by default 60
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}


def pytest_configure(config: pytest.Config) -> None:
    begin(config)
    os.environ.update(OFFLINE)
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="ray")  # short, because Ray has sockets in it
        os.environ["RAY_TMPDIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder))


def pytest_report_header() -> str:
    return "with " + ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", *FRAMEWORKS))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before xdist starts its workers, which find what has been compiled here, as do the processes of tests."""
    if not session.config.option.collectonly:
        torch.set_num_threads(1)
        oktopk.run_threads(2, lambda comm: oktopk.sparse_allreduce(torch.ones(100), 0.1, comm=comm))
