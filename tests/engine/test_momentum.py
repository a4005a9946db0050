"""Momentum correction against a reference with plain loops over ranks: local velocities, and factor masking."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oktopk
from tests.support import stepping
from tests.support.stepping import LAYOUTS, SEVERAL, SHAPES, SIZE, flat, gradients, run_steps

M = 0.7
STEPS = 7


def exact_top_k(acc: Tensor, k: int) -> Tensor:
    return acc.abs().topk(k).indices


def reference(world: int, names: list[str], k: int, warmup: int, steps: int) -> list[Tensor]:
    """What topka makes of a bucket: u = m u + g, v = v + u; what leaves clears both."""
    size = flat({}, names).numel()
    u = torch.zeros(world, size, dtype=torch.float64)
    v = torch.zeros(world, size, dtype=torch.float64)
    results = []
    for step in range(steps):
        u = M * u + torch.stack([flat(gradients(rank, step), names) for rank in range(world)])
        v = v + u
        sent = torch.zeros_like(v)
        for rank in range(world):
            if step < warmup:
                sent[rank] = v[rank]
            else:
                left = exact_top_k(v[rank], k)
                sent[rank, left] = v[rank, left]
                u[rank, left] = 0.0
        v = v - sent
        results.append(sent.mean(0))
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_velocities_and_masking_as_in_the_reference(layout: str, world: int) -> None:
    names_of = [list(SHAPES)] if layout == "one bucket" else SEVERAL
    options = {"buckets": LAYOUTS[layout], "momentum": M, "warmup_steps": 3}
    steps = run_steps(world, STEPS, algorithm="topka", **options)
    for names in names_of:
        k = max(1, int(flat({}, names).numel() * 0.05))
        expected = reference(world, names, k, 3, STEPS)
        for step, mean in zip(steps, expected, strict=True):
            assert all(stepping.same_bits(record.result, step[0].result) for record in step)
            torch.testing.assert_close(flat(step[0].result, names), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", list(oktopk.ALGORITHMS))
def test_dense_steps_have_the_velocity_of_the_mean(algorithm: str) -> None:
    """As an optimizer with that momentum makes it of the averaged gradient."""
    steps = run_steps(3, 5, algorithm=algorithm, momentum=M, warmup_steps=5)
    velocity = torch.zeros(SIZE, dtype=torch.float64)
    for t, step in enumerate(steps):
        velocity = M * velocity + torch.stack([flat(gradients(rank, t)) for rank in range(3)]).mean(0)
        for record in step:
            torch.testing.assert_close(flat(record.result), velocity, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_what_leaves_clears_residual_and_velocity(algorithm: str) -> None:
    """Of each rank alone: both are cleared at the same entries, and elsewhere u = m u + g and v = v + u."""
    for step in run_steps(3, STEPS, algorithm=algorithm, momentum=M, warmup_steps=1)[1:]:
        for record in step:
            u = M * flat(record.before["velocities"]) + flat(record.grads)
            v = flat(record.before["residuals"]) + u
            left = flat(record.after["velocities"]) == 0
            assert left.any()
            torch.testing.assert_close(flat(record.after["velocities"])[~left], u[~left], rtol=1e-5, atol=1e-6)
            if algorithm != "gtopk":  # which also takes in what a merge drops
                assert not flat(record.after["residuals"])[left].any()
                torch.testing.assert_close(flat(record.after["residuals"])[~left], v[~left], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", stepping.SPARSE)
def test_excluded_parameters_keep_plain_momentum_in_the_sparse_phase(algorithm: str, layout: str) -> None:
    options = {"buckets": LAYOUTS[layout], "momentum": M, "warmup_steps": 2, "dense": ["b", "d"]}
    velocity = torch.zeros(34, dtype=torch.float64)
    for t, step in enumerate(run_steps(2, 5, algorithm=algorithm, **options)):
        mean = torch.stack([flat(gradients(rank, t), ["b", "d"]) for rank in range(2)]).mean(0)
        velocity = M * velocity + mean
        for record in step:
            assert stepping.same_bits(record.result, step[0].result)
            torch.testing.assert_close(flat(record.result, ["b", "d"]), velocity, rtol=1e-4, atol=1e-5)


def test_a_dense_step_after_sparse_ones_is_the_same_on_all_ranks() -> None:
    """Velocities differ from rank to rank by then; the result must not."""

    def job(comm: oktopk.Communicator) -> list[stepping.Grads]:
        with stepping.reducer_on(comm, momentum=M, warmup_steps=0) as sparse:
            stepping.record_steps(sparse, comm.rank, range(4))
            state = sparse.state_dict()
        with stepping.reducer_on(comm, "dense", momentum=M) as dense:
            dense.load_state_dict(state | {"algorithm": repr(dense._engine.settings.algorithm), "groups": []})
            return [record.result for record in stepping.record_steps(dense, comm.rank, range(4, 7))]

    by_rank = stepping.on_ranks(3, job)
    for results in zip(*by_rank, strict=True):
        assert all(stepping.same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_two_kinds_of_momentum_are_an_error(make: type[torch.optim.Optimizer]) -> None:
    model = torch.nn.Linear(3, 2)
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    inner = make(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="replaces the optimizer's own momentum"):
        oktopk.DistributedOptimizer(inner, model.named_parameters(), momentum=0.9)
