"""Set up once per session: the hypothesis profile, one torch thread, and kernels that are compiled already."""

from __future__ import annotations

import fcntl
import math
import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

from oktopk.kernels import backend
from oktopk.wire import message as wire
from oktopk.wire.sparse_vector import SparseVector

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels then run on the CPU

collect_ignore = [] if find_spec("triton") else ["contracts/test_triton.py"]  # no build for this platform

settings.register_profile(
    "oktopk",
    deadline=None,  # a busy machine is not a bug
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
    max_examples=60,
)
settings.load_profile("oktopk")


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Call every kernel on tiny input, so that no test pays for the compiler out of its own timeout.

    One worker after the other: those who come later find what the first one has compiled.
    """
    with open(tmp_path_factory.getbasetemp().parent / "kernels.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        _compile_kernels()


def _compile_kernels() -> None:
    torch.set_num_threads(1)
    x = torch.ones(33)
    kernels = backend(x)
    kernels.select(x, math.inf, 0)
    for keep_old in (False, True):
        kernels.accumulate_select(x.clone(), x.clone(), math.inf, 0, keep_old)
    kernels.accumulate_select_pieces([x.clone()], [x.clone()], math.inf, 0)
    kernels.first_equal(x, 1.0, 1)
    kernels.kth_magnitude(x, 1)
    kernels.sampled_threshold(x, 1)
    kernels.sampled_threshold(torch.ones(2**20 - 1), 1)
    kernels.magnitude_histogram(x, 0, 1)
    kernels.magnitude_moments(x)
    for dtype, size in ((torch.int32, 64), (torch.int64, 2**31)):
        vector = SparseVector(torch.arange(3, dtype=dtype), torch.ones(3), size)
        vector.at_least(1.0)
        kernels.scatter_add_(x.clone(), vector.indices, vector.values)
        kernels.assign_(x.clone(), vector.indices, vector.values)
        kernels.scatter_add_pieces_([x.clone()], vector.indices, vector.values)
        kernels.assign_pieces_([x.clone()], vector.indices, vector.values)
        kernels.union_sum([(vector.indices, vector.values)], 0, 33)
        kernels.common(vector.indices, vector.values, vector.indices)
        tag = wire.Tag(0, 0, 0, 0, size, 0, size)
        wire.decode(wire.encode(vector, tag, wire.ValueCode.FP16)[0], tag)
