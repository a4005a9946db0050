"""What the fork server of `worlds` has in memory: ranks that it forks find imports and kernels there, at once.

It stays single-threaded, so that forking it is safe. What it holds is exempt from the collector: a rank's first
collection would otherwise copy all of it.
"""

from __future__ import annotations

import gc
import threading
from contextlib import suppress

import hypothesis  # noqa: F401  as most test modules do
import pytest  # noqa: F401
import torch._dynamo  # DDP and optimizers import it when the first one is made
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import oktopk.tools.bench.job
import oktopk.tools.race.job
import oktopk.train.run  # noqa: F401
from tests.support.kernels.warming import call_every_kernel

with suppress(ImportError):
    import sklearn.datasets  # noqa: F401  the data of examples

call_every_kernel()
if threading.active_count() > 1:
    raise RuntimeError(f"not safe to fork: {threading.enumerate()}")
gc.collect()
gc.freeze()
