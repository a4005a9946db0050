"""The exact global threshold of Ok-Topk: the same whether candidates are gathered or counted."""

from __future__ import annotations

import pytest
import torch

import oktopk
from oktopk.algorithms import oktopk as module
from oktopk.wire.sparse_vector import SparseVector


def thresholds(parts: list[torch.Tensor], k: int) -> list[float]:
    def rank(comm: oktopk.Communicator) -> float:
        values = parts[comm.rank]
        indices = torch.arange(values.numel(), dtype=torch.int32)
        return module.kth_over_ranks(comm, SparseVector(indices, values, 1000), k)

    return oktopk.run_threads(len(parts), rank)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["random", "ties", "empty ranks", "too few"])
def test_gathering_and_counting_agree(world: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(world)
    for trial in range(10):
        sizes = [int(torch.randint(1, 60, (), generator=generator)) for _ in range(world)]
        if kind == "empty ranks":
            sizes = [size if rank % 2 == trial % 2 else 0 for rank, size in enumerate(sizes)]
        parts = [torch.randn(size, generator=generator) * 10.0 ** (trial - 5) for size in sizes]
        if kind == "ties":
            parts = [part.sign() for part in parts]
        total = sum(sizes)
        k = total + 1 if kind == "too few" else max(1, total // 2)
        expected = 0.0 if k > total else torch.cat(parts).abs().sort(descending=True).values[k - 1].item()
        monkeypatch.setattr(module, "_FEW", 10**9)
        assert thresholds(parts, k) == [expected] * world
        monkeypatch.setattr(module, "_FEW", 0)
        assert thresholds(parts, k) == [expected] * world
