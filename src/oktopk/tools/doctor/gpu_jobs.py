"""What `oktopk doctor --gpu` runs in processes of their own: `python -m oktopk.tools.doctor.gpu_jobs NAME`.

Each prints one JSON object. Without a GPU they run what a CPU can: Triton's interpreter, fake tensors, gloo.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.algorithms import OkTopkStatic
from oktopk.algorithms.oktopk_static import StaticPlan, static_step
from oktopk.kernels import slots
from oktopk.kernels.values import ValueCode
from oktopk.testing.gradients import heavy_tailed

from .kernels import find_differences

SIZE, STEPS, DENSITY = 50_000, 6, 0.02
TIMED = 20


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels() -> dict[str, Any]:
    """Triton's kernels against the reference, on the GPU or in the interpreter."""
    from oktopk.kernels import cuda
    from oktopk.kernels.cuda import slots as ours

    x = heavy_tailed(4001)(0, 0).to(_device())
    rows, differ = x[:4000].view(2, 2000), find_differences(cuda, x)
    bits = slots.magnitude_bits(rows)
    middle = bits.median().int()
    cut = slots.Cut(middle.repeat(2), middle.repeat(2) + (1 << 20), torch.full_like(middle, 100).repeat(2))
    pairs = {
        "count_coarse": (ours.count_coarse(rows), slots.count_coarse(rows)),
        "count_fine": (ours.count_fine(rows, middle >> 20), slots.count_fine(rows, middle >> 20)),
        "compact": (
            torch.cat(_floats(ours.compact(rows, cut, 500))),
            torch.cat(_floats(slots.compact(rows, cut, 500))),
        ),
    }
    return {"differ": differ + [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]}


def _floats(parts: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [part.double() for part in parts]


def waits() -> dict[str, Any]:
    """Where a step in static shapes makes the host wait, by torch; without a GPU, by fake tensors."""
    plan = StaticPlan(SIZE, 500, 0, 1, ValueCode.FP16)
    if not torch.cuda.is_available():
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            static_step(plan, _Nobody(), torch.empty(SIZE), torch.zeros((), dtype=torch.int64))
        return {"waits": []}
    acc, checksum = torch.randn(SIZE, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    static_step(plan, _Nobody(), acc, checksum)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        static_step(plan, _Nobody(), acc, checksum)
        torch.cuda.set_sync_debug_mode("default")
    return {"waits": [f"{one.filename}:{one.lineno}" for one in caught]}


class _Nobody:
    """The collectives of a rank that is alone."""

    rank, world = 0, 1

    def all_to_all(self, rows: Tensor, phase: str) -> Tensor:
        return rows

    def all_gather(self, row: Tensor, phase: str, control: bool = False) -> Tensor:
        return row[None]

    def all_reduce_(self, counts: Tensor, phase: str) -> None:
        pass


def streams() -> dict[str, Any]:
    """Steps of the hook on a stream of their own, under torch's sanitizer (TORCH_CUDA_SANITIZER=1)."""
    with _Group(0, 1, "nccl"), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for algorithm in ("oktopk", "oktopk-static"):
            model = DistributedDataParallel(_model(64).cuda(), device_ids=[0])
            with oktopk.OkTopkState(algorithm=algorithm, warmup_steps=1, auto=False).register(model):
                for _ in range(4):
                    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        torch.cuda.synchronize()
    return {}


def ranks() -> dict[str, Any]:
    """Two ranks, by nccl or gloo: laws 1 and 2 on the device path; its speed beside dense sums, on GPUs."""
    rank, backend = int(os.environ["RANK"]), os.environ["OKTOPK_DOCTOR_BACKEND"]
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    with _Group(rank, 2, backend):
        found: dict[str, Any] = {"broken": _laws(rank, device)}
        if backend == "nccl":
            found["seconds"] = {name: _time(name, device) for name in ("dense", "bf16", "oktopk", "oktopk-static")}
    return found if rank == 0 else {}


def _laws(rank: int, device: torch.device) -> list[str]:
    broken: list[str] = []
    parameter = torch.zeros(SIZE, device=device, requires_grad=True)
    algorithm = OkTopkStatic(resident=True)
    with oktopk.AllReducer([("x", parameter)], algorithm, DENSITY, warmup_steps=0, timeout=60) as reducer:
        given, got = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
        for step in range(STEPS):
            gradient = heavy_tailed(SIZE)(rank, step)
            given += gradient.double()
            mean = reducer.sync({"x": gradient.to(device)})["x"].cpu()
            got += 2 * mean.double()
            both = [torch.empty_like(mean, device=device) for _ in range(2)]
            dist.all_gather(both, mean.to(device))
            if not torch.equal(both[0], both[1]):
                broken.append(f"law 1, step {step}: the ranks have different results")
        left = given - got / 2 - reducer.state_dict()["residuals"]["x"].cpu().double()
        total = left.to(device, torch.float32)
        dist.all_reduce(total)
        if float(total.abs().max()) > 1e-3:
            broken.append(f"law 2: {float(total.abs().max())} is lost")
    return broken


def _time(name: str, device: torch.device) -> float:
    """Seconds of a step of 25M parameters, with almost nothing to compute."""
    model = DistributedDataParallel(_model(5000).to(device), device_ids=[device.index])
    state = None
    if name == "bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    elif name != "dense":
        state = oktopk.OkTopkState(algorithm=name, warmup_steps=0, auto=False, values="fp16").register(model)
    x = torch.randn(1, 5000, device=device)
    for step in range(5 + TIMED):
        if step == 5:
            torch.cuda.synchronize()
            start = time.perf_counter()
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / TIMED
    if state is not None:
        state.close()
    return seconds


def _model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, width)


class _Group:
    """A process group for a block, at an address that the parent has chosen."""

    def __init__(self, rank: int, world: int, backend: str) -> None:
        self.rank, self.world, self.backend = rank, world, backend

    def __enter__(self) -> None:
        store = os.environ["OKTOPK_DOCTOR_STORE"]
        dist.init_process_group(
            self.backend, init_method=f"file://{store}", rank=self.rank, world_size=self.world,
            timeout=timedelta(seconds=60),
        )  # fmt: skip

    def __exit__(self, *exception: object) -> None:
        dist.destroy_process_group()


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "kernels": kernels, "waits": waits, "streams": streams, "ranks": ranks,
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]]()), flush=True)
