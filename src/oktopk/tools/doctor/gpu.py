"""`oktopk doctor --gpu`: the GPU path, examined in processes of its own, as far as there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .findings import OK, PROBLEM, WARNING, Check, Finding, Unknown, World

_SECONDS = 300
_GAIN = 1.1
"""A step must be so many times faster to count."""


def run_jobs(name: str, count: int = 1, **settings: str) -> dict[str, Any]:
    """Run a job of gpu_jobs.py in `count` processes; what the first one prints. Raises Unknown if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OKTOPK_DOCTOR_STORE": str(Path(folder, "store")), **settings}
        command = [sys.executable, "-m", "oktopk.tools.doctor.gpu_jobs", name]
        ranks = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(count)
        ]  # fmt: skip
        try:
            done = [(rank, *rank.communicate(timeout=_SECONDS)) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise Unknown(f"no answer within {_SECONDS} s") from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, _, errors in done:
        if rank.returncode:
            raise Unknown(errors.strip().splitlines()[-1] if errors.strip() else f"exit code {rank.returncode}")
    found: dict[str, Any] = json.loads(done[0][1].splitlines()[-1])
    return found


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpu(world: World) -> Finding:
    if not _gpus():
        return Finding(
            PROBLEM, f"torch {torch.__version__} finds no GPU: what follows is what a CPU can show",
            "run this on a machine with a GPU, with a CUDA build of torch",
        )  # fmt: skip
    names = ", ".join(torch.cuda.get_device_name(place) for place in range(_gpus()))
    return Finding(OK, f"{names}; torch {torch.__version__}, CUDA {torch.version.cuda}")


def check_kernels(world: World) -> Finding:
    if find_spec("triton") is None:
        return Finding(WARNING, "no Triton: torch operations are used", "pip install 'oktopk[cuda]'")
    differ = run_jobs("kernels", TRITON_INTERPRET="0" if _gpus() else "1")["differ"]
    place = "on the GPU" if _gpus() else "in Triton's interpreter"
    if differ:
        return Finding(PROBLEM, f"kernels differ from the reference {place}: {', '.join(differ)}", "report a bug")
    return Finding(OK, f"Triton's kernels equal the reference {place}, to the bit")


def check_streams(world: World) -> Finding:
    if not _gpus():
        return Finding(WARNING, "not run: torch's sanitizer needs a GPU (a test checks streams without one)")
    run_jobs("streams", TORCH_CUDA_SANITIZER="1")
    return Finding(OK, "torch's sanitizer finds no unsynchronised access in steps of the hook on another stream")


def check_waits(world: World) -> Finding:
    waits = run_jobs("waits")["waits"]
    if waits:
        return Finding(PROBLEM, f"the device path makes the host wait at {', '.join(waits)}", "report a bug")
    how = "torch's sync debug mode counts" if _gpus() else "fake tensors find"
    return Finding(OK, f"{how} no wait of the host in a step of oktopk-static")


def check_ranks(world: World) -> Finding:
    backend = "nccl" if _gpus() > 1 else "gloo"
    found = run_jobs("ranks", 2, OKTOPK_DOCTOR_BACKEND=backend)
    if found["broken"]:
        return Finding(PROBLEM, f"2 ranks, {backend}: " + "; ".join(found["broken"]), "report a bug")
    text = f"2 ranks, {backend}: oktopk-static keeps laws 1 and 2"
    if "seconds" not in found:
        return Finding(OK, f"{text}; speed not measured, which needs 2 GPUs")
    return Finding(OK, f"{text}\n{compare_speed(found['seconds'])}")


def compare_speed(seconds: Mapping[str, float]) -> str:
    """A line per way to average, and whether compression pays between these GPUs."""
    dense = min(seconds["dense"], seconds["bf16"])
    best = min(("oktopk", "oktopk-static"), key=lambda name: seconds[name])
    lines = [f"{name:<13} {1000 * value:.3g} ms per step of 25M parameters" for name, value in seconds.items()]
    gain = dense / seconds[best]
    verdict = "pays" if gain >= _GAIN else "does not pay"
    return "\n".join([*lines, f"{best} is {gain:.3g} times as fast as dense: {verdict}"])


GPU_CHECKS: dict[str, Check] = {
    "gpu": check_gpu, "kernels": check_kernels, "streams": check_streams, "host waits": check_waits,
    "ranks": check_ranks,
}  # fmt: skip
"""What `--gpu` examines."""
