"""Load the weights of an earlier run to start from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.utils.files import open_regular

from ..config.options import ConfigError
from ..run_folder import CHECKPOINTS
from .snapshot import BUFFERS, MANIFEST, CheckpointError, DamagedCheckpoint, read_manifest, read_tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load from the newest checkpoint of a run, or from a file with a state_dict. No code in it is executed.

    Files of a checkpoint are read as --resume reads them: their size and digest must be those of the manifest.

    Args:
        model: Gets the weights, and the running statistics if there are any.
        path: A run folder, the folder of one checkpoint, or a file.
    """
    try:
        tensors = _read_run(path) if path.is_dir() else _read_file(path)
    except CheckpointError as error:
        raise ConfigError(f"--pretrain {path}: {error}") from error
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
    folder = run if (run / MANIFEST).exists() else _newest(run)
    try:
        manifest = read_manifest(folder)
        shared, first = read_tensors(folder, manifest.shared), read_tensors(folder, manifest.ranks[0])
    except DamagedCheckpoint as error:  # it begins with the name of the file
        raise DamagedCheckpoint(f"{folder.name}/{error}") from error
    return {**_tensors(shared, run), **_tensors(first, run, BUFFERS)}


def _newest(run: Path) -> Path:
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    found = {int(one.name[5:]): one for one in folder.glob("step-*") if re.fullmatch("step-[0-9]{1,18}", one.name)}
    committed = [step for step, one in found.items() if (one / MANIFEST).exists()]
    if not committed:
        raise ConfigError(f"--pretrain {run}: no checkpoint found")
    return found[max(committed)]


def _read_file(path: Path) -> Mapping[str, Tensor]:
    """Read a file from elsewhere, which has no digest, or one of the files of a checkpoint."""
    if (path.parent / MANIFEST).exists():
        manifest = read_manifest(path.parent)
        for record in (manifest.shared, *manifest.ranks):
            if record.name == path.name:
                return _tensors(read_tensors(path.parent, record), path)
    try:
        with open_regular(path) as file:
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"--pretrain {path}: {error.strerror or error}") from error
    except Exception as error:  # another kind of file can raise almost anything
        raise ConfigError(f"--pretrain {path}: not a state_dict: {str(error)[:200]}") from error
    return _tensors(found, path)


def _tensors(found: Any, given: Path, part: str = "parameters") -> Mapping[str, Tensor]:
    tensors = found.get(part, found.get("state_dict", found)) if isinstance(found, dict) else {}
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.values())):
        raise ConfigError(f"--pretrain {given}: not a state_dict: it holds more than plain tensors")
    return tensors


def _is_plain(value: object) -> bool:
    """Whether it is a tensor that can be copied: neither sparse nor quantized."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
