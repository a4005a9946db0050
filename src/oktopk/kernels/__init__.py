"""Compute kernels by device: `reference` (torch, any device), `cpu` (Numba) and `cuda` (Triton).

All kernels take 1-D contiguous float32 tensors. `reference` defines what they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from torch import Tensor

from . import coding, reference, slots
from .types import SLOPE_STEP, SMALLEST, Picked, bin_edge, bin_of, index_dtype


class Backend(Protocol):
    """One implementation of the kernels."""

    def accumulate_select(
        self, residual: Tensor, grad: Tensor, threshold: float, capacity: int, keep_old: bool = ...
    ) -> Picked: ...
    def accumulate_select_pieces(
        self, residuals: Sequence[Tensor], grads: Sequence[Tensor], threshold: float, capacity: int
    ) -> Picked: ...
    def to_host(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...
    def select(self, x: Tensor, threshold: float, capacity: int) -> Picked: ...
    def first_equal(self, x: Tensor, magnitude: float, limit: int) -> Tensor: ...
    def kth_magnitude(self, x: Tensor, k: int) -> float: ...
    def magnitude_histogram(self, x: Tensor, first: int, bins: int) -> list[int]: ...
    def filter_at_least(self, indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...
    def magnitude_moments(self, x: Tensor) -> tuple[float, float]: ...
    def scale_(self, x: Tensor, factor: float) -> float: ...
    def scatter_add_(self, out: Tensor, indices: Tensor, values: Tensor) -> int: ...
    def assign_(self, out: Tensor, indices: Tensor, values: Tensor) -> int: ...
    def scatter_add_pieces_(
        self, pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = ..., counted: bool = ...
    ) -> int: ...
    def assign_pieces_(
        self, pieces: Sequence[Tensor], indices: Tensor, values: Tensor, factor: float = ...
    ) -> int: ...
    def union_sum(self, parts: Iterable[tuple[Tensor, Tensor]], base: int, span: int) -> tuple[Tensor, Tensor]: ...
    def common(self, indices: Tensor, values: Tensor, others: Tensor) -> tuple[Tensor, Tensor]: ...


try:
    from . import cpu
    from .cpu import coding as codes
except ImportError:  # no Numba on this platform: torch and NumPy do the same, slower
    codes = coding  # type: ignore[misc]
    _cpu: Backend = reference
else:
    _cpu = cpu


@cache
def backend_for(device_type: str) -> Backend:
    """The kernels for a device type. Triton is imported on first use."""
    if device_type == "cpu":
        return _cpu
    if device_type != "cuda":
        return reference
    try:
        from . import cuda
    except ImportError:  # no Triton: the torch kernels do the same with more memory and synchronisation
        return reference
    return cuda


def must_compile() -> bool:
    """Whether Numba has no machine code of the kernels yet: in a new installation, or after an update."""
    if _cpu is reference:
        return False
    from .cpu import selection, vector

    source = max(Path(str(module.__file__)).stat().st_mtime for module in (selection, vector))
    cache = Path(str(selection.select_one.stats.cache_path))
    return not any(index.stat().st_mtime >= source for index in cache.glob("selection.*.nbi"))


def backend(x: Tensor) -> Backend:
    """The kernels for the device of x."""
    return backend_for(x.device.type)


class SlotKernels(Protocol):
    """One implementation of the kernels of static shapes."""

    def count_coarse(self, rows: Tensor) -> Tensor: ...
    def count_fine(self, rows: Tensor, coarse_bin: Tensor) -> Tensor: ...
    def compact(self, rows: Tensor, cut: slots.Cut, room: int) -> tuple[Tensor, Tensor]: ...


@cache
def slot_kernels_for(device_type: str) -> SlotKernels:
    """The kernels of static shapes for a device type. Triton is imported on first use."""
    if device_type == "cuda":
        try:
            from .cuda import slots as cuda_slots
        except ImportError:  # no Triton: torch does the same in more passes
            return slots
        return cuda_slots
    return slots


def slot_kernels(x: Tensor) -> SlotKernels:
    """The kernels of static shapes for the device of x; those of torch for fake tensors."""
    return slot_kernels_for(x.device.type) if type(x) is Tensor else slots


__all__ = [
    "SLOPE_STEP",
    "SMALLEST",
    "Backend",
    "Picked",
    "SlotKernels",
    "backend",
    "backend_for",
    "bin_edge",
    "bin_of",
    "index_dtype",
    "must_compile",
    "reference",
    "slot_kernels",
    "slot_kernels_for",
]
