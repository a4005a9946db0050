"""What the GPU kernels promise besides the contract: blocks in any order, few waits, code that a GPU can run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import oktopk
from oktopk import kernels
from oktopk.kernels import Backend, cuda, reference
from tests.support.kernels.backends import DEVICE, ON_DEVICE, TritonKernels
from tests.support.kernels.inputs import bits, sparse_part, spread, sums

pytestmark = ON_DEVICE


def answers(backend: Backend, size: int) -> list[Any]:
    """What the kernels say about vectors of a size, to the bit."""
    residual, grad, out = spread(size, 1), spread(size, 2), spread(size, 3)
    parts = [sparse_part(size, seed) for seed in (4, 5, 6)]
    picked = backend.accumulate_select(residual, grad, 1.0, size // 2, True)
    kept = backend.filter_at_least(*parts[0], 0.7)
    union = backend.union_sum(parts, 0, size)
    return [
        picked.indices.tolist(), bits(picked.values), picked.count, picked.above, picked.finite, bits(residual),
        bits(grad), kept[0].tolist(), sums(kept[1]), backend.scatter_add_(out, *parts[1]), sums(out),
        union[0].tolist(), sums(union[1]),
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, cuda.BLOCK - 1, cuda.BLOCK, cuda.BLOCK + 1, 2 * cuda.BLOCK + 1])
def test_sizes_around_the_edge_of_a_block(size: int) -> None:
    assert answers(TritonKernels(cuda.BLOCK), size) == answers(reference, size)


def test_blocks_may_come_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """From last to first in the interpreter; a GPU takes them as it likes anyway."""
    expected = answers(TritonKernels(32), 333)
    if DEVICE == "cpu":
        from triton.runtime.interpreter import interpreter_builder as builder

        forward = builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: forward(builder.grid_dim[0] - 1 - x, y, z))
    assert answers(TritonKernels(32), 333) == expected


@pytest.mark.parametrize("room", [1, 3, 40])
def test_nothing_is_written_beyond_the_room(room: int) -> None:
    """The blocks after the one that fills it stay out, too."""
    x = torch.ones(3 * cuda.BLOCK, device=DEVICE)
    indices, values = torch.full((60,), -7, device=DEVICE), torch.full((60,), -7.0, device=DEVICE)
    cuda._compact(x, x, (indices[:room], values[:room]), cuda._tally(x, 1.0, 1.0), 1.0)
    assert indices.tolist() == [*range(room), *[-7] * (60 - room)]
    assert values.tolist() == [1.0] * room + [-7.0] * (60 - room)


# --- how often the host waits --------------------------------------------------------------------------------

READS = {"tolist", "item", "__int__", "__float__", "__bool__", "__index__", "nonzero", "masked_select", "bincount"}


class CountReads(TorchFunctionMode):
    """Counts what the host cannot know before the device has finished, indexing by masks included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and getattr(args[1], "dtype", None) is torch.bool
        self.count += name in READS or by_mask
        return func(*args, **(kwargs or {}))


def calls(x: Tensor, indices: Tensor) -> dict[str, Callable[[Backend], object]]:
    return {
        "select": lambda kernel: kernel.select(x, 1.0, 9),
        "accumulate": lambda kernel: kernel.accumulate_select(x.clone(), x.clone(), 1.0, 9, True),
        "histogram": lambda kernel: kernel.magnitude_histogram(x, 100, 128),
        "filter": lambda kernel: kernel.filter_at_least(indices, x, 1.0),
        "assign": lambda kernel: kernel.assign_(x.clone(), indices, x),
        "scatter": lambda kernel: kernel.scatter_add_(x.clone(), indices, x),
        "union": lambda kernel: kernel.union_sum([(indices, x), (indices, x)], 0, x.numel()),
    }


def test_the_host_waits_once_per_kernel() -> None:
    """All numbers of a kernel come in one transfer; the reference, to see that this counts, waits more often."""
    x, indices = spread(200).to(DEVICE), torch.arange(200, dtype=torch.int32, device=DEVICE)
    for name, call in calls(x, indices).items():
        with CountReads() as ours:
            call(cuda)
        assert ours.count == 1, name
    with CountReads() as theirs:
        reference.select(x, 1.0, 9)
        reference.filter_at_least(indices, x, 1.0)
    assert theirs.count >= 4


# --- the library on these kernels ----------------------------------------------------------------------------


def test_tensors_on_gpus_get_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of torch where there is no Triton, or where a device is of another kind."""
    kernels.backend_for.cache_clear()
    assert kernels.backend_for("cuda") is cuda
    assert kernels.backend_for("meta") is reference
    kernels.backend_for.cache_clear()
    with monkeypatch.context() as without_triton:
        without_triton.setitem(sys.modules, "oktopk.kernels.cuda", None)
        without_triton.delattr(kernels, "cuda")
        assert kernels.backend_for("cuda") is reference
    kernels.backend_for.cache_clear()


def three_steps(algorithm: str, values: str, device: str) -> list[list[int]]:
    """Results and residuals of three ranks after three steps, to the bit."""

    def run(comm: oktopk.Communicator) -> list[int]:
        residual, state, seen = torch.zeros(1501, device=device), None, []
        for step in range(3):
            mean, info = oktopk.sparse_allreduce(
                spread(1501, 10 * step + comm.rank).to(device), 0.05, algorithm, residual, comm,
                values=values, state=state, step=step,
            )  # fmt: skip
            state = info.state
            seen += bits(mean.cpu()) + bits(residual.cpu())
        return seen

    return oktopk.run_threads(3, run, in_turns=True)  # the interpreter is for one thread at a time


@pytest.mark.parametrize(
    ("algorithm", "values"), [("oktopk", "fp16"), *((name, "fp32") for name in oktopk.ALGORITHMS)]
)
def test_every_algorithm_comes_to_the_same(monkeypatch: pytest.MonkeyPatch, algorithm: str, values: str) -> None:
    expected = three_steps(algorithm, values, "cpu")
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "backend_for", lambda device_type: cuda)
    assert three_steps(algorithm, values, DEVICE) == expected


# --- code for GPUs -------------------------------------------------------------------------------------------

COMPILE = """
import re, subprocess, sys, tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oktopk.kernels import cuda
from oktopk.kernels.cuda import kernels as cuda_kernels, slot_kernels
from oktopk.kernels.slots import COARSE, COARSE_BITS, FINE, FINE_BITS

ARCH = int(sys.argv[1])
FLOATS = {name: "*fp32" for name in ("x", "grad", "values", "out_values", "out", "sums", "rows")}
COUNTS = {"tallies": "*i32", "ends": "*i64", "touched": "*i8"}
SLOTS = {name: "*i32" for name in ("only", "counts", "low", "top", "quota", "ends", "places")}

def build(kernel, integer, marks=False, more={}, **fixed):
    types = {**FLOATS, **COUNTS, "threshold": "fp32", "higher": "fp32", **more}
    types.update(indices="*" + integer, out_indices="*" + integer)
    if marks:
        types.update(x="*i8", grad="*i8")
    fixed["BLOCK"] = cuda.BLOCK
    signature = {name: "constexpr" if name in fixed else types.get(name, integer) for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    built = triton.compile(ASTSource(kernel, signature, constexprs=fixed), target=GPUTarget("cuda", ARCH, 32))
    assert ".ftz" not in built.asm["ptx"], "subnormal numbers would be lost"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(name + r":(\\d+)", shown)[1]) for name in ("REG", "STACK", "LOCAL"))
    assert registers <= 128, (kernel, registers)  # four blocks of 128 threads on a multiprocessor, at least
    assert stack == local == 0, (kernel, "spills registers", stack, local)
    print(kernel.fn.__name__, "sm_%d" % ARCH, registers, built.metadata.shared)

for integer in ("i32", "i64"):
    for add, keep, nan in ((False, False, True), (False, False, False), (True, False, True), (True, True, True)):
        build(cuda_kernels.tally, integer, ADD=add, KEEP_OLD=keep, NAN_TOO=nan)
    build(cuda_kernels.tally, integer, marks=True, ADD=False, KEEP_OLD=False, NAN_TOO=True)
    for listed, nan, marks in ((False, True, False), (True, False, False), (False, True, True)):
        build(cuda_kernels.compact, integer, marks, LISTED=listed, NAN_TOO=nan)
    build(cuda_kernels.scatter_add, integer)
    build(cuda_kernels.add_to_region, integer)
build(slot_kernels.count_bins, "i32", more=SLOTS, OUTER=0, SHIFT=COARSE_BITS, BINS=COARSE, TURNS=16)
build(slot_kernels.count_bins, "i32", more=SLOTS, OUTER=COARSE_BITS, SHIFT=FINE_BITS, BINS=FINE, TURNS=16)
build(slot_kernels.tally_cut, "i32", more=SLOTS)
build(slot_kernels.write_cut, "i32", more=SLOTS)
"""


@pytest.mark.processes
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_for_a_gpu(tmp_path: Path, architecture: int) -> None:
    """To machine code, which needs no GPU: the interpreter lets types pass that the compiler refuses.

    None of it spills registers, and none takes so many that few blocks fit on a multiprocessor.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "error", "-c", COMPILE, str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
