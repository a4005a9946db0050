"""Where the host would wait for a GPU: counted on CPU tensors that pass for those of a GPU, by file and line.

Every read of a value and every copy between host and device is a wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

import oktopk
from oktopk import kernels
from oktopk.engine.settings import Settings
from oktopk.engine.step import StepReducer
from oktopk.feedback.buckets import Bucket
from oktopk.kernels import cpu, cuda

_SOURCE = str(Path(oktopk.__file__).parent) + "/"
_READS = {
    "tolist",
    "item",
    "__int__",
    "__float__",
    "__bool__",
    "__index__",
    "nonzero",
    "masked_select",
    "bincount",
    "cpu",
}
_HOST = (
    "algorithms/",
    "comm/",
    "wire/",
    "kernels/coding.py",
    "kernels/cpu/",
    "metrics/",
    "kernels/cuda/transfer.py",
)
"""Code whose tensors are in host memory on a machine with a GPU, too: sparse vectors and messages."""


def _where() -> str:
    """The innermost call of the library, as "file:line function"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_SOURCE) and code.co_name not in ("backend", "streams_of"):
            return f"{code.co_filename.removeprefix(_SOURCE)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return ""


def _on_host(place: str) -> bool:
    """Whether a call touches host memory only: numbers that the device has told a step ago are there already."""
    path, function = place.split()
    told = path.startswith("engine/device/reducer.py") and function == "read"
    return told or (path.startswith(_HOST) and not path.startswith("kernels/cuda/"))


class CountWaits(TorchFunctionMode):
    """Counts by place, as "file:line function what"."""

    def __init__(self) -> None:
        super().__init__()
        self.at: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return _where().startswith(_HOST)
        name = getattr(func, "__name__", "")
        masks = name in ("__getitem__", "__setitem__") and getattr(args[1], "dtype", None) is torch.bool
        moves = name == "to" and any(isinstance(a, torch.device) for a in [*args[1:], *kwargs.values()])
        made = name in ("tensor", "as_tensor") and kwargs.get("device") is not None
        if name in _READS or masks or moves or made:
            place = _where()
            if place and not _on_host(place):
                self.at[f"{place} {name}"] += 1
        return func(*args, **kwargs)


def count_waits(world: int, buckets: int, values: str = "fp32", algorithm: Any = "oktopk") -> Counter[str]:
    """The waits of rank 0 in a steady sparse step of fused buckets."""

    def backend_for(device_type: str) -> kernels.Backend:
        """Dense vectors are on the GPU: those of buckets and residuals."""
        return cuda if _where().startswith(("engine/", "feedback/")) else cpu

    def run(comm: oktopk.Communicator) -> Counter[str]:
        settings = Settings.from_options(algorithm, 0.05, 0, None, False, {"values": values})
        steps = StepReducer(settings, comm, unused_stay=True)
        layout = [Bucket((f"p{i}a", f"p{i}b"), (300, 100)) for i in range(buckets)]
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            grads = [torch.randn(bucket.size, generator=random) ** 3 for bucket in layout]
            steps.begin()
            with CountWaits() as waits:
                for bucket, grad in zip(layout, grads, strict=True):
                    steps.reduce(bucket, grad)
                steps.finish(0.0, 0.0)
        return waits.at

    with patch.object(kernels, "backend_for", backend_for):
        return oktopk.run_threads(world, run, in_turns=True)[0]


SCENES = ((2, 1, "fp32"), (2, 4, "fp32"), (2, 4, "fp16"), (4, 4, "fp16"), (8, 4, "fp16"))
"""Ranks, fused buckets, values."""


def table(found: Sequence[Counter[str]]) -> str:
    """The table of docs/cuda.md, from the counts of all scenes: `python -m tests.support.syncs` prints it."""
    rows: dict[str, list[int]] = {}
    for place, waits in enumerate(found):
        for where, count in waits.items():
            path, function, what = where.split()
            row = rows.setdefault(f"`{path.partition(':')[0]}`, `{function}`: {what}", [0] * len(SCENES))
            row[place] += count
    rows = dict(sorted(rows.items())) | {"**all**": [sum(waits.values()) for waits in found]}
    head = (
        "| where | " + " | ".join(f"P = {world}, {b} bucket{'s' * (b > 1)}, {v}" for world, b, v in SCENES) + " |"
    )
    lines = [head, "|---" * (1 + len(SCENES)) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items())])


if __name__ == "__main__":
    print(table([count_waits(*scene) for scene in SCENES]))
