"""Steps of an AllReducer on ranks as threads: a small model, its gradients, and the laws of a step."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import oktopk
from oktopk.feedback.buckets import Bucket
from oktopk.metrics.events import StepEvent

T = TypeVar("T")
Grads = dict[str, Tensor]
State = dict[str, Any]
Edit = Callable[[int, int, Grads], None]
"""edit(rank, step, grads) spoils gradients in place."""

SHAPES = {"a": (13, 7), "b": (31,), "c": (50, 4), "d": (3,)}
SIZE = 91 + 31 + 200 + 3
SEVERAL = [["c"], ["a", "d"], ["b"]]
LAYOUTS: dict[str, Any] = {"one bucket": "model", "several buckets": SEVERAL}
SPARSE = [name for name in oktopk.ALGORITHMS if name != "dense"]
COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")
HISTORY = (*COUNTERS, "schedule")
"""What also changes with a step that is skipped."""
EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Record:
    """One step on one rank."""

    grads: Grads
    before: dict[str, Any]
    result: Grads
    after: dict[str, Any]
    event: StepEvent


@dataclass(frozen=True)
class FixedScale:
    """A GradScaler whose scale stays."""

    scale: float

    def get_scale(self) -> float:
        return self.scale

    def is_enabled(self) -> bool:
        return True


def on_ranks(world: int, job: Callable[[oktopk.Communicator], T], timeout: float = 20.0) -> list[T]:
    return oktopk.run_threads(world, job, timeout=timeout)


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int) -> Grads:
    """Heavy-tailed and different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator).pow(3) for name, shape in SHAPES.items()}


def reducer_on(comm: oktopk.Communicator | None, algorithm: Any = "oktopk", **options: Any) -> oktopk.AllReducer:
    defaults: dict[str, Any] = {
        "density": 0.05, "warmup_steps": 2, "buckets": "model", "fusion_entries": 0, "values": "fp32",
    }  # fmt: skip
    return oktopk.AllReducer(parameters().items(), algorithm, comm=comm, **(defaults | options))


def submit(reducer: oktopk.AllReducer, bucket: Bucket, grads: Grads) -> None:
    """Hand in one bucket of a step, as sync() does with all of them."""
    reducer._gradients.submit(reducer._engine, bucket, grads)


def finish(reducer: oktopk.AllReducer, grads: Grads) -> Grads:
    """End a step whose buckets were handed in one by one."""
    return reducer._gradients.finish(reducer._engine, grads)


def record_steps(
    reducer: oktopk.AllReducer, rank: int, steps: Iterable[int], edit: Edit | None = None
) -> list[Record]:
    records = []
    for step in steps:
        grads = gradients(rank, step)
        if edit is not None:
            edit(rank, step, grads)
        before = reducer.state_dict()
        result = reducer.sync({name: grad.clone() for name, grad in grads.items()})
        assert reducer.last is not None
        records.append(Record(grads, before, result, reducer.state_dict(), reducer.last))
    return records


def run_steps(
    world: int, steps: int, edit: Edit | None = None, algorithm: Any = "oktopk", **options: Any
) -> list[list[Record]]:
    """records[t][r]: what happened in step t on rank r."""

    def job(comm: oktopk.Communicator) -> list[Record]:
        with reducer_on(comm, algorithm, **options) as reducer:
            return record_steps(reducer, comm.rank, range(steps), edit)

    return [list(step) for step in zip(*on_ranks(world, job), strict=True)]


def through_a_file(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


# Laws.


def flat(named: Mapping[str, Tensor], names: Iterable[str] = SHAPES) -> Tensor:
    """In double, in the order of the names; what is missing counts as zeros."""
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return torch.cat([named.get(name, zeros[name]).double().flatten() for name in names])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


def assert_mass(step: Sequence[Record], names: Iterable[str] = SHAPES, gain: float = 1.0) -> None:
    """What stays in the residuals and what went into the mean is what there was, entry by entry."""
    chosen, world = list(names), len(step)
    there_was = sum(flat(r.before["residuals"], chosen) + gain * flat(r.grads, chosen) for r in step)
    there_is = sum(flat(r.after["residuals"], chosen) for r in step) + world * flat(step[0].result, chosen)
    size = sum(flat(r.before["residuals"], chosen).abs() + gain * flat(r.grads, chosen).abs() for r in step)
    tolerance = 8 * world * EPSILON * torch.as_tensor(size) + torch.finfo(torch.float32).tiny
    assert bool(((torch.as_tensor(there_is) - there_was).abs() <= tolerance).all())


def assert_laws(steps: Iterable[Sequence[Record]]) -> None:
    """The same result on all ranks to the bit, no mass lost, all ranks skip together, nothing but finite."""
    for step in steps:
        assert len({record.event.skipped for record in step}) == 1
        for record in step:
            assert same_bits(record.result, step[0].result)
            assert_finite(record.result)
            assert_finite(record.after)
        if not step[0].event.skipped:
            assert_mass(step)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Tensors and primitives of a nested state, by path."""
    if isinstance(value, Mapping):
        children: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    else:
        return {path: value}
    return {where: leaf for key, child in children for where, leaf in leaves(child, f"{path}/{key}").items()}


def assert_finite(state: Any) -> None:
    for path, leaf in leaves(state).items():
        if isinstance(leaf, (float, Tensor)):
            assert bool(torch.as_tensor(leaf).isfinite().all()), path


def assert_same_state(one: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str] = ()) -> None:
    """Equal to the bit. Memory that was never used is the same as zeros."""
    for key in one.keys() | other.keys():
        if key in but:
            continue
        left, right = leaves(one[key]), leaves(other[key])
        for path in left.keys() | right.keys():
            here, there = left.get(path), right.get(path)
            if isinstance(here, Tensor) or isinstance(there, Tensor):
                assert key in ("residuals", "velocities")
                here, there = (
                    x if x is not None else torch.zeros_like(y) for x, y in ((here, there), (there, here))
                )
                assert torch.equal(bits(here), bits(there)), key + path
            else:
                assert here == there, key + path
