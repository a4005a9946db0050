"""The cases in which the laws are checked on an algorithm."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Algorithm, find_algorithm
from ..comm import Communicator, run_threads
from .gradients import EDGE_CASES, SHAPES, SIZE, Gradient, all_in_one_region, heavy_tailed, tiny_and_huge
from .laws import Outcome, Steps, assert_laws, bits, follow, run

_FEW = (1, 2, 3, 5)


def check_algorithm(algorithm: str | Algorithm | type[Algorithm], worlds: Iterable[int] = _FEW) -> None:
    """Check an algorithm: agreement, conservation, density 1, edge cases, non-finite numbers, checkpoints.

    Args:
        algorithm: a name, an object, or a class that needs no arguments.
        worlds: numbers of ranks.

    Raises:
        AssertionError: a law does not hold.

    Example:
        >>> import oktopk.testing
        >>> oktopk.testing.check_algorithm("topka", worlds=[2])
    """
    for world in worlds:
        for case in CASES:
            check_case(algorithm, case, world)


def check_case(algorithm: str | Algorithm | type[Algorithm], case: str, world: int) -> None:
    """Check one case of CASES on one number of ranks.

    Raises:
        AssertionError: a law does not hold, or the algorithm raises an error.
    """
    chosen = algorithm() if isinstance(algorithm, type) else find_algorithm(algorithm)
    try:
        CASES[case](chosen, world)
    except AssertionError as error:
        raise AssertionError(f"{chosen!r}, {case}, P = {world}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{chosen!r}, {case}, P = {world}: raised {error!r}") from error


def _shape(size: int, density: float, algorithm: Algorithm, world: int) -> None:
    assert_laws(run(world, heavy_tailed(size), 4, algorithm, density))


def _edge(gradient: Gradient, algorithm: Algorithm, world: int) -> None:
    assert_laws(run(world, gradient, 3, algorithm, 0.02))


def _lossy(values: str, algorithm: Algorithm, world: int) -> None:
    """Law 2 with a lossy wire: the sender keeps its rounding error."""
    for gradient in (heavy_tailed(SIZE), all_in_one_region, tiny_and_huge):
        assert_laws(run(world, gradient, 4, algorithm, 0.05, values=values))


def _density_one(algorithm: Algorithm, world: int) -> None:
    """Law 3: with density 1 the result is the mean, and nothing stays behind."""
    gradient = heavy_tailed(SIZE)
    for t, step in enumerate(run(world, gradient, 3, algorithm, 1.0)):
        every = torch.stack([gradient(rank, t).double() for rank in range(world)])
        error = (step[0].mean.double() - every.mean(0)).abs()
        if not (error <= 1e-6 * every.abs().mean(0)).all():
            raise AssertionError(f"law 3: at density 1 the result is not the mean, but {float(error.max())} off")
        if any(outcome.after.any() for outcome in step):
            raise AssertionError("law 3: at density 1 something stays in a residual")


def _empty(algorithm: Algorithm, world: int) -> None:
    (step,) = run(world, lambda rank, step: torch.zeros(0), 1, algorithm, 0.1)
    if any(outcome.mean.numel() for outcome in step):
        raise AssertionError("law 5: the mean of empty tensors is not empty")


def _not_finite(bad: float, algorithm: Algorithm, world: int) -> None:
    """One bad number on one rank: every rank skips the step, and no residual changes."""

    def gradient(rank: int, step: int) -> Tensor:
        x = heavy_tailed(SIZE)(rank, step)
        if step == 1 and rank == world - 1:
            x[SIZE // 2] = bad
        return x

    before, skipped, after = run(world, gradient, 3, algorithm, 0.02)
    for rank, outcome in enumerate(skipped):
        if not outcome.info.skipped:
            raise AssertionError(f"{bad} on rank {world - 1}: rank {rank} does not skip the step")
        if outcome.mean.any() or not torch.equal(bits(outcome.before), bits(outcome.after)):
            raise AssertionError(f"{bad} on rank {world - 1}: a skipped step changes rank {rank}")
    assert_laws([before, after])


def _same_bits(algorithm: Algorithm, world: int) -> None:
    first, second = (run(world, heavy_tailed(SIZE), 4, algorithm, 0.03) for _ in range(2))
    _assert_same(first, second, "the same inputs give other bits the second time")


def _checkpoint(algorithm: Algorithm, world: int) -> None:
    """A state that was saved and loaded continues as if nothing had happened."""
    gradient, steps, cut = heavy_tailed(SIZE), 6, 3

    def rank(comm: Communicator) -> list[Outcome]:
        residual = torch.zeros(SIZE)
        first = follow(comm, gradient, range(cut), algorithm, 0.03, residual, None)
        state = first[-1].info.state
        if state is not None:
            state = algorithm.unpack_state(_saved_and_loaded(algorithm.pack_state(state)))
        return [*first, *follow(comm, gradient, range(cut, steps), algorithm, 0.03, residual, state)]

    resumed = [list(outcomes) for outcomes in zip(*run_threads(world, rank), strict=True)]
    _assert_same(run(world, gradient, steps, algorithm, 0.03), resumed, "a resumed run differs")


def _saved_and_loaded(packed: Any) -> Any:
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _assert_same(first: Steps, second: Steps, problem: str) -> None:
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            if not (torch.equal(bits(x.mean), bits(y.mean)) and torch.equal(bits(x.after), bits(y.after))):
                raise AssertionError(problem)


Case = Callable[[Algorithm, int], None]
CASES: dict[str, Case] = {
    **{name: partial(_shape, *shape) for name, shape in SHAPES.items()},
    **{name.replace("_", " "): partial(_edge, gradient) for name, gradient in EDGE_CASES.items()},
    **{f"values {values}": partial(_lossy, values) for values in ("bf16", "fp16", "e4m3")},
    "density 1": _density_one,
    "an empty tensor": _empty,
    "one NaN": partial(_not_finite, torch.nan),
    "one infinity": partial(_not_finite, torch.inf),
    "the same bits": _same_bits,
    "a checkpoint": _checkpoint,
}
"""What check_algorithm() checks, by name: functions of the algorithm and the number of ranks."""
