"""Ray Train: two lines in the training function of a TorchTrainer; checkpoints have the state of every worker.

python examples/ray_train.py --ranks 2
python examples/ray_train.py --ranks 2 --out run
python examples/ray_train.py --ranks 2 --out run     # as many steps again: Ray resumes what it finds in the folder
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import accuracy, batches, digits, network, options, summary
from torch.nn.functional import cross_entropy

from oktopk.metrics.sinks import MemorySink

sys.path.pop(0)  # this folder: without it, "accelerate" and "lightning" are the packages and not these files
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # no cluster: workers use 127.0.0.1, on every system
import common
import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_checkpoint, get_context
from ray.train.torch import TorchTrainer, prepare_model

from oktopk.integrations.ray import register, report


def train_function(chosen: dict[str, Any]) -> None:
    """What every worker runs."""
    torch.set_num_threads(1)
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    train, test = digits()
    plain = network()
    model = prepare_model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory, first = MemorySink(), 0
    register(model, optimizer, sinks=[memory], **chosen["settings"])
    if checkpoint := get_checkpoint():  # register() has loaded its own part of it
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"), weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    last = first + chosen["steps"]
    for x, y in batches(train, rank, world, range(first, last)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    result = {"summary": summary(world, accuracy(plain, test), memory)}
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            parts = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": last}
            torch.save(parts, Path(folder, "model.pt"))
        report(result, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--out", type=Path, help="folder for checkpoints; Ray goes on from the newest in it")
    chosen = parser.parse_args()
    ray.cloudpickle.register_pickle_by_value(common)  # workers need not find that file
    # All of it on this machine, and nothing for other machines to connect to.
    ray.init(
        address="local", num_cpus=chosen.ranks, include_dashboard=False, _node_ip_address="127.0.0.1",
        log_to_driver=False, object_store_memory=2**27,
    )  # fmt: skip
    settings = {
        "density": chosen.density,
        "warmup_steps": chosen.warmup_steps,
        "auto": False,  # the default is to go back to dense where that is faster: here, on one host, it is
    }
    with tempfile.TemporaryDirectory() as folder:
        out = str((chosen.out or Path(folder)).resolve())
        trainer = TorchTrainer(
            train_function,
            train_loop_config={"steps": chosen.steps, "settings": settings},
            scaling_config=ScalingConfig(num_workers=chosen.ranks),
            run_config=RunConfig(name="digits", storage_path=out),
        )
        print(trainer.fit().metrics["summary"])
    ray.shutdown()


if __name__ == "__main__":
    main()
