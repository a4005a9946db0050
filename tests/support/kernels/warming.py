"""Every CPU kernel, called once: afterwards no test pays for the compiler, or for loading what it has made."""

from __future__ import annotations

import math

import torch

from oktopk.kernels import backend
from oktopk.wire import message as wire
from oktopk.wire.sparse_vector import SparseVector


def call_every_kernel() -> None:
    """On tiny input; with one thread of torch from here on."""
    torch.set_num_threads(1)
    x = torch.ones(33)
    kernels = backend(x)
    kernels.select(x, math.inf, 0)
    for keep_old in (False, True):
        kernels.accumulate_select(x.clone(), x.clone(), math.inf, 0, keep_old)
    kernels.accumulate_select_pieces([x.clone()], [x.clone()], math.inf, 0)
    kernels.first_equal(x, 1.0, 1)
    kernels.kth_magnitude(x, 1)
    kernels.kth_magnitude(torch.ones(2**20 - 1), 1)
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
