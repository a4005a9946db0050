"""HSDP of a GPT on two nodes of two ranks: torch's own, and sparse between replicas. Time per step, and bytes.

    python benchmarks/hsdp.py                       # in network namespaces, about five minutes
    python benchmarks/hsdp.py --scenes 256@100mbit --rounds 1 --steps 12
    torchrun --nproc-per-node 4 benchmarks/hsdp.py --way updates --steps 500          # one way, with its val loss

Ways: `native` gives fully_shard the whole mesh, `sparse` is oktopk.FsdpState, `updates` is oktopk.LocalOptimizer
on the mesh. A scene is TOKENS@RATE: tokens of a rank and step, and the rate of the link of each node. Rounds
alternate between ways, so that a disturbance affects all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import oktopk
from oktopk.algorithms.volume import WORD_BYTES, ring_words
from oktopk.tools.lab import Lab, enter_user_namespace, lab_problem, parse_rate
from oktopk.tools.tables import format_table
from oktopk.train.data.text.tokens import embedded_tokens
from oktopk.train.models.gpt import GPTModel, Size

WAYS = ("native", "sparse", "updates")
HOSTS, RANKS_PER_HOST = 2, 2
HEADERS = ["tokens", "link", "way", "step ms", "in rounds", "MB sent by a rank", "times faster"]


def make_model(size: Size, vocabulary: int, mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = GPTModel(size, vocabulary)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def draw(tokens: Tensor, step: int, rank: int, context: int, count: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(tokens) - context, (count, 1), generator=random)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def run(options: argparse.Namespace) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (world // options.shards, options.shards), mesh_dim_names=("replicate", "shard")
    )
    size = Size(options.layers, options.width, max(1, options.width // 64), options.context, 0.0)
    text = embedded_tokens()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = make_model(size, text.vocabulary, mesh if options.way == "native" else mesh["shard"])
    optimizer = make_optimizer(options.optimizer, model, options.lr)
    settings = {
        "density": options.density,
        "warmup_steps": options.warmup,
        "auto": False,
        "values": options.values,
    }
    state: Any = None
    if options.way == "sparse":
        state = oktopk.FsdpState(mesh, **settings).register(model, optimizer)
    elif options.way == "updates":
        state = optimizer = oktopk.LocalOptimizer(optimizer, model=model, mesh=mesh, **settings)
    count, seconds = options.tokens // options.context, []
    for step in range(options.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 50)
        optimizer.zero_grad()
        loss_of(model, *draw(text.train, step, rank, size.context, count)).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    if options.way == "updates":
        optimizer.synchronize()
    with torch.no_grad():
        loss = float(loss_of(model, *draw(text.valid, 0, rank, size.context, 32)))
    own = torch.tensor([*seconds, loss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before])
    every = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(every, own)
    if state is not None:
        state.close()
    times = torch.stack(every)[:, : options.steps].amax(0).tolist()
    entries = sum(p.numel() for p in model.parameters())
    ring = WORD_BYTES * ring_words(entries / options.shards, world // options.shards)
    steady = times[options.warmup + 3 if state is not None else 3 :]
    return {
        "way": options.way, "mesh": list(mesh.mesh.shape),
        "parameters": entries,
        "tokens": options.tokens, "density": options.density, "steps": options.steps,
        "step_ms": round(1e3 * median(steady), 1), "first_ms": round(1e3 * times[0], 1),
        "val_loss": round(float(torch.stack(every)[:, -2].mean()), 4),
        "peak_mb": round(float(torch.stack(every)[:, -1].max()) / 1024, 1),
        "sent_bytes": ring if state is None else state.last.wire.sent_bytes,
    }  # fmt: skip


# All ways and scenes, one after the other.


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every scene: the medians of both ways, and what native takes over ours."""
    rows = []
    for tokens, link in options.scenes:
        found: dict[str, list[dict[str, Any]]] = {"native": [], "sparse": []}
        with Lab(HOSTS, link, RANKS_PER_HOST) as lab:
            for _ in range(options.rounds):
                for way, records in found.items():
                    words = f"--way {way} --tokens {tokens} --steps {options.steps} --density {options.density}"
                    result = lab.run([sys.executable, __file__, *words.split()], timeout=300)
                    records.append(json.loads(result[0].stdout))
                    print(f"{tokens}@{link} {way}: {records[-1]['step_ms']} ms", file=sys.stderr, flush=True)
        native = median(record["step_ms"] for record in found["native"])
        for way, records in found.items():
            steps = [record["step_ms"] for record in records]
            rows.append(
                {
                    "tokens": tokens, "link": link, "way": way, "step_ms": median(steps), "rounds": steps,
                    "sent_bytes": records[-1]["sent_bytes"], "faster": native / median(steps),
                }
            )  # fmt: skip
    return rows


def scene(text: str) -> tuple[int, str]:
    tokens, _, link = text.partition("@")
    try:
        parse_rate(link)
        return int(tokens), link
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a scene is like 256@100mbit: {error}") from error


def main() -> None:
    enter_user_namespace()  # which starts this program again, so that it comes before any work
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scenes", nargs="+", type=scene, default=[(256, "100mbit"), (1024, "1gbit")], metavar="TOKENS@RATE"
    )
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--density", type=float, default=0.01, help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "out" / "hsdp.json")
    options = parser.parse_args()
    if problem := lab_problem():
        parser.error(problem)
    rows = compare(options)
    print(format_table(HEADERS, [_cells(row) for row in rows]))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=2) + "\n")


def _cells(row: dict[str, Any]) -> list[object]:
    sent = f"{row['sent_bytes'] / 1e6:.2f}"
    rounds = " ".join(f"{step:.0f}" for step in row["rounds"])
    return [row["tokens"], row["link"], row["way"], row["step_ms"], rounds, sent, f"{row['faster']:.2f}"]


def one_way() -> None:
    """The program of every rank. Rank 0 prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="sparse")
    for name, kind, default in (
        ("shards", int, 2), ("layers", int, 6), ("width", int, 256), ("context", int, 128), ("tokens", int, 256),
        ("steps", int, 40), ("warmup", int, 5), ("density", float, 0.01), ("lr", float, 1e-3),
        ("values", str, "fp32"), ("optimizer", str, "adamw"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = run(options)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        main()
        sys.exit()
    one_way()
    os._exit(0)  # everything is printed; torch may abort while gloo's threads end
