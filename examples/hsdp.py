"""HSDP: FSDP2 shards a GPT inside each replica, and replicas average gradients by sparse all-reduce.

The ranks of a node are a replica; here all of them are on this machine, on CPUs.

    torchrun --nproc-per-node 4 examples/hsdp.py --shards 2                             # 2 replicas x 2 shards
    torchrun --nproc-per-node 4 examples/hsdp.py --shards 2 --out run                   # saves a checkpoint
    torchrun --nproc-per-node 2 examples/hsdp.py --shards 1 --out run --resume          # on another mesh
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import join_or_be_alone, options
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import oktopk
from oktopk.metrics.sinks import MemorySink
from oktopk.train.data.text.tokens import embedded_tokens
from oktopk.train.models.gpt import GPTModel, Size


def draw(tokens: Tensor, step: int, rank: int, context: int, count: int = 8) -> tuple[Tensor, Tensor]:
    """Windows of the text and what follows each character; the same ones whenever that step is asked for."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(tokens) - context, (count, 1), generator=random)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def main() -> None:
    parser = options(__doc__, steps=60, density=0.02)
    parser.add_argument("--shards", type=int, default=1, help="ranks of a replica (default: %(default)s)")
    parser.add_argument("--out", help="folder for a checkpoint at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    join_or_be_alone()
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size() // chosen.shards

    mesh = init_device_mesh("cpu", (replicas, chosen.shards), mesh_dim_names=("replicate", "shard"))
    text, size = embedded_tokens(), Size(layers=2, width=64, heads=2, context=32, dropout=0.0)
    model = GPTModel(size, text.vocabulary)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])  # one replica's part of the mesh, not all of it
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    memory = MemorySink()
    state = oktopk.FsdpState(
        mesh,
        density=chosen.density,
        warmup_steps=chosen.warmup_steps,
        auto=False,  # the default is to go back to dense where that is faster: here, on one host, it is
        sinks=[memory],
    ).register(model, optimizer)

    if chosen.resume:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=chosen.out)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        state.load_checkpoint(chosen.out)  # residuals of the old mesh are shared out over the new one

    first = state.step
    for step in range(first, first + chosen.steps):
        optimizer.zero_grad()
        with state.no_sync():  # two micro-batches, one exchange
            (loss_of(model, draw(text.train, 2 * step, rank, size.context)) / 2).backward()
        (loss_of(model, draw(text.train, 2 * step + 1, rank, size.context)) / 2).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # gradients are means of all ranks by now
        optimizer.step()

    if chosen.out:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        saved = {"model": of_model, "optimizer": of_optimizer, "oktopk": state.state_dict()}
        dcp.save(saved, checkpoint_id=chosen.out)
    with torch.no_grad():
        loss = loss_of(model, draw(text.valid, 0, 0, size.context, count=64))
    if rank == 0:
        phases = memory.by_phase()
        print(f"mesh          {replicas} replicas x {chosen.shards} shards")
        counts = ", ".join(f"{int(means['steps'])} {phase}" for phase, means in phases.items())
        print(f"steps         {first} to {state.step}: {counts}")
        print(f"val loss      {loss:.3f}")
        sent = (f"{m['sent_bytes'] / 1e3:.1f} kB in a {p} step" for p, m in phases.items())
        print(f"a rank sends  {', '.join(sent)}")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
