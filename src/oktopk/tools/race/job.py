"""The program of every rank of a cell: `python -m oktopk.tools.race.job FOLDER`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from oktopk.comm import GroupCommunicator
from oktopk.engine.voice.speaking import hushed

from .cells import CellFolder
from .loop import CellLoop, make_config


def main(path: str) -> None:
    folder = CellFolder(Path(path))
    spec = folder.spec()
    timeout = make_config(spec).timeout
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    comm = GroupCommunicator.exclusive(timeout=timeout)
    try:
        with hushed():
            CellLoop(spec, folder, comm).run()
        dist.barrier()
    finally:
        comm.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # everything is written; on a busy machine torch sometimes aborts while DDP's threads end
