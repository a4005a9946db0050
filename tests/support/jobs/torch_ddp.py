"""torch's own tests of DistributedDataParallel on CPUs, with the hook registered on every DDP model they make.

    BACKEND=gloo WORLD_SIZE=2 TEMP_DIR=… python -m tests.support.jobs.torch_ddp [TEST …]

torch.testing imports the package expecttest.
"""

from __future__ import annotations

import gc
import sys
import unittest
from typing import Any

import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import distributed_test

import oktopk
from tests.support.kernels.warming import call_every_kernel

TESTS = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
)


def register_on_every_model() -> None:
    make = DistributedDataParallel.__init__

    def make_and_register(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        oktopk.OkTopkState(density=1.0, warmup_steps=0, auto=False, values="fp32").register(self)

    DistributedDataParallel.__init__ = make_and_register  # type: ignore[method-assign]


class TorchDDP(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Each test starts WORLD_SIZE processes. Forked ones need not import torch again."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, *args: Any, **kwargs: Any) -> None:
        register_on_every_model()
        super()._run(rank, test_name, *args, **kwargs)


if __name__ == "__main__":
    call_every_kernel()  # here, and not in every child; what is frozen, their collectors need not copy
    gc.collect()
    gc.freeze()
    suite = unittest.TestSuite(TorchDDP(name) for name in sys.argv[1:] or TESTS)
    ended = unittest.TextTestRunner(verbosity=2).run(suite)
    sys.exit(not ended.wasSuccessful() or bool(ended.skipped))
