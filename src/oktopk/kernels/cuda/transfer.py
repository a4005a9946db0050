"""Copies between host and device: one of each per vector, through pinned memory where there is a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(x: Tensor) -> bool:
    return x.is_cpu


def copy_to_host(x: Tensor) -> Tensor:
    """A copy in host memory. The host waits for it."""
    if not x.is_cuda:
        return x.cpu()
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    here.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return here


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for what follows on the current stream. The host does not wait for it."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
