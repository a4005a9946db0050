"""The backends that the kernel tests run: Numba, torch, and Triton on a GPU or else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from oktopk.kernels import Picked, cpu, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # tests/conftest.py chooses the interpreter accordingly
ON_DEVICE = [pytest.mark.gpu] if DEVICE == "cuda" else []


def moved(x: Any, device: str) -> Any:
    """The same with its tensors on the device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, Picked):
        return Picked(x.indices.to(device), x.values.to(device), x.count, x.above, x.finite)
    if isinstance(x, (list, tuple)):
        return type(x)(moved(item, device) for item in x)
    return (moved(item, device) for item in x) if isinstance(x, Iterator) else x


class TritonKernels:
    """The GPU kernels for tests that have their tensors in host memory, in blocks of a given size."""

    def __init__(self, block: int) -> None:
        from oktopk.kernels import cuda

        self.module, self.block = cuda, block

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self.module, name)

        def run(*given: Any) -> Any:
            there = moved(given, DEVICE)
            quiet = np.errstate(over="ignore", invalid="ignore")  # the interpreter is NumPy, which warns
            with patch.object(self.module, "BLOCK", self.block), quiet:
                result = kernel(*there)
            for before, after in zip(given, there, strict=True):
                if isinstance(before, Tensor):  # kernels work in place
                    before.copy_(after)
            return moved(result, "cpu")

        return run


# Blocks so small that small inputs have several; the real size has a test of its own.
TRITON = [pytest.param(TritonKernels(64), id="cuda", marks=ON_DEVICE)] if find_spec("triton") else []
NUMBA = pytest.param(cpu, id="cpu")
EVERY = [NUMBA, pytest.param(reference, id="reference"), *TRITON]

fast_kernels = pytest.mark.parametrize("fast", [NUMBA, *TRITON])
every_kernels = pytest.mark.parametrize("kernels", EVERY)
