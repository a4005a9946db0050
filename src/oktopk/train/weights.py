"""Weights of an earlier run to start from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import ConfigError
from .folder import CHECKPOINTS


def load_weights(model: nn.Module, path: Path) -> None:
    """From a run's folder, its newest checkpoint; or from a file that holds a state_dict. Nothing in it is run."""
    tensors = _read(_newest(path) if path.is_dir() else path)
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        if name not in tensors:
            raise ConfigError(f"--pretrain {path}: no weights for {name}; is it of the same network?")
        if tensors[name].shape != parameter.shape:
            shapes = f"{list(tensors[name].shape)} instead of {list(parameter.shape)}"
            raise ConfigError(f"--pretrain {path}: {name} has the shape {shapes}; is it of the same network?")
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in tensors:
                tensor.copy_(tensors[name])


def _newest(run: Path) -> Path:
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    manifests = sorted(folder.glob("step-*/manifest.json"))
    if not manifests:
        raise ConfigError(f"--pretrain {run}: no checkpoint in it")
    return manifests[-1].parent / str(json.loads(manifests[-1].read_bytes())["shared"]["name"])


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"--pretrain {path}: {error.strerror or error}") from error
    except Exception as error:  # of many kinds, for a file that is something else
        raise ConfigError(f"--pretrain {path}: not a file of weights: {str(error)[:200]}") from error
    tensors = found.get("parameters", found.get("state_dict", found)) if isinstance(found, dict) else {}
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ConfigError(f"--pretrain {path}: not a file of weights: it holds something else")
    return tensors
