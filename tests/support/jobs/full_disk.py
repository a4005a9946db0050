"""Fill a disk of its own by checkpoints, as root, in a mount namespace of its own.

`python -m tests.support.jobs.full_disk FOLDER` says what a save that does not fit raises on each rank,
and what is loaded after it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from oktopk.comm import Communicator, run_threads
from oktopk.train.checkpoint.snapshot import CheckpointError
from oktopk.train.checkpoint.storage import Checkpoints
from tests.support.train.saving import MODEL, load, made, save

WORLD, ROOM = 3, 2**20


def save_too_much(comm: Communicator, folder: Path) -> str:
    """Rank 1 has more than there is room for."""
    snapshot = made(20, comm.rank)
    large = {**snapshot.own, "task": torch.zeros(ROOM, dtype=torch.uint8)} if comm.rank == 1 else snapshot.own
    try:
        Checkpoints(folder, MODEL, keep=1).save(comm, replace(snapshot, own=large))
    except CheckpointError as error:
        return str(error)
    return "saved"


def main(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", folder], check=True)
    save(folder, 10, WORLD)
    said = run_threads(WORLD, lambda comm: save_too_much(comm, folder))
    left, loaded = os.listdir(folder), [snapshot.step for snapshot in load(folder, WORLD)]
    save(folder, 30, WORLD, keep=1)
    print(json.dumps({"said": said, "left": left, "loaded": loaded, "then": os.listdir(folder)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
