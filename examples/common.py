"""Shared by the examples: data, a small model, options, and the summary at the end.

Keep this file beside the examples, so that Python finds it.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from oktopk.metrics.sinks import MemorySink


def options(description: str | None, steps: int = 200, density: float = 0.01) -> argparse.ArgumentParser:
    """Make a parser with the options of all examples. By default, most steps are sparse."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default, text in (
        ("--steps", int, steps, "training steps"),
        ("--density", float, density, "share of its entries that a rank sends in a sparse step"),
        ("--warmup-steps", int, 20, "dense steps before the sparse phase"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: {default})")
    return parser


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1500 images of 8x8 pixels to learn from and 297 to test with; they come with scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def batches(data: TensorDataset, rank: int, world: int, steps: range, size: int = 32) -> Iterator[list[Tensor]]:
    """A batch of this rank's share of the data per step; the same one whenever that step is asked for."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        chosen = torch.randperm(len(data), generator=generator) * world + rank
        yield [tensor[chosen[chosen < len(data)][:size]] for tensor in data.tensors]


def network() -> nn.Sequential:
    """167,000 parameters, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return float((model(x).argmax(dim=1) == y).float().mean())


def join_or_be_alone() -> None:
    """Without torchrun, set what it would have set for a single rank: then DDP works in a lone process too."""
    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def summary(world: int, correct: float, memory: MemorySink) -> str:
    """What was learned, and what this rank sent for it. The bytes of a dense step are those of a ring."""
    phases = memory.by_phase()
    count = {phase: int(phases[phase]["steps"]) if phase in phases else 0 for phase in ("dense", "sparse")}
    sent = {phase: means["sent_bytes"] for phase, means in phases.items()}
    skipped = sum(step.skipped for step in memory.steps)
    lines = [
        f"ranks         {world}",
        f"accuracy      {100 * correct:.1f} % of unseen digits",
        f"steps         {count['dense']} dense, {count['sparse']} sparse, {skipped} of them skipped",
    ]
    if any(sent.values()):
        parts = [f"{sent[phase] / 1e3:.1f} kB in a {phase} step" for phase in sent]
        less = f": {sent['dense'] / sent['sparse']:.0f} times less" if len(sent) == 2 else ""
        lines.append(f"a rank sends  {', '.join(parts)}{less}")
    else:
        lines.append("a rank sends  nothing: it is alone (try torchrun --nproc-per-node 2)")
    if count["sparse"]:
        ratio = phases["sparse"]["compression_ratio"]
        lines.append(f"compression   {ratio:.0f} entries of the gradient for one of the result, in a sparse step")
    return "\n".join(lines)
