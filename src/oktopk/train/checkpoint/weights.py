"""Load the weights of an earlier run to start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.utils.files import open_regular

from ..config.options import ConfigError
from ..run_folder import CHECKPOINTS
from .snapshot import BUFFERS, MANIFEST, read_manifest


def load_weights(model: nn.Module, path: Path) -> None:
    """Load from the newest checkpoint of a run folder, or from a file with a state_dict. No code in it is
    executed.
    """
    tensors = _read_run(path) if path.is_dir() else _read(path, path)
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, here in wanted.items():
        if name not in tensors:
            if isinstance(here, nn.Parameter):
                raise ConfigError(f"--pretrain {path}: no weights for {name}; is it the same network?")
        elif tensors[name].shape != here.shape:
            shapes = f"{list(tensors[name].shape)} instead of {list(here.shape)}"
            raise ConfigError(f"--pretrain {path}: {name} has shape {shapes}; is it the same network?")
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in tensors:
                tensor.copy_(tensors[name])


def _read_run(run: Path) -> Mapping[str, Tensor]:
    """Read the parameters of the newest checkpoint, and the running statistics of rank 0."""
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    manifests = sorted(folder.glob(f"step-*/{MANIFEST}"))
    if not manifests:
        raise ConfigError(f"--pretrain {run}: no checkpoint found")
    newest = manifests[-1].parent
    manifest = read_manifest(newest)
    return {**_read(newest / manifest.shared.name, run), **_read(newest / manifest.ranks[0].name, run, BUFFERS)}


def _read(path: Path, given: Path, part: str = "parameters") -> Mapping[str, Tensor]:
    try:
        with open_regular(path) as file:
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"--pretrain {given}: {error.strerror or error}") from error
    except Exception as error:  # another kind of file can raise almost anything
        raise ConfigError(f"--pretrain {given}: not a state_dict: {str(error)[:200]}") from error
    tensors = found.get(part, found.get("state_dict", found)) if isinstance(found, dict) else {}
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.values())):
        raise ConfigError(f"--pretrain {given}: not a state_dict: it holds more than plain tensors")
    return tensors


def _is_plain(value: object) -> bool:
    """Whether it is a tensor that can be copied: neither sparse nor quantized."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
