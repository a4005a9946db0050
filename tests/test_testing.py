"""oktopk.testing: good algorithms and codecs pass, and each broken one fails by the law that it breaks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import oktopk
from oktopk.algorithms import Chosen, Reduction, TopkA, gather_all, select_exact, skip
from oktopk.testing import CASES, check_algorithm, check_case, check_values
from oktopk.wire.codecs import ValueCodec
from oktopk.wire.message import max_message_bytes


def test_every_law_has_a_case() -> None:
    """1 and 2 in all of them, 3, 5, and what a step may do to a job."""
    assert len(CASES) >= 20
    assert {"density 1", "an empty tensor", "one NaN", "a checkpoint", "zeros", "cancelling", "ties"} <= set(CASES)
    assert {"fewer entries than ranks", "k = 1", "k times P above n"} <= set(CASES)


def test_an_algorithm_may_be_a_name_a_class_or_an_object() -> None:
    for algorithm in ("topka", TopkA, TopkA()):
        check_case(algorithm, "k = 1", 2)
    check_algorithm(TopkA, worlds=[1])
    with pytest.raises(ValueError, match="unknown algorithm"):
        check_case("nothing", "k = 1", 2)


class Broken(TopkA):
    """TopkA, with a mistake."""

    name: ClassVar[str] = "broken"

    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        return reduction

    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        reduction = super().reduce(comm, acc, k, state)
        return reduction if reduction.skipped else self.mistake(comm, reduction)


class TellsRanksDifferentThings(Broken):
    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        parts = [part.with_values(part.values * (1 + comm.rank)) for part in reduction.parts]
        return replace(reduction, parts=parts)


class KeepsWhatItSent(Broken):
    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        return replace(reduction, leaving=())


class DropsWhatItDidNotSend(Broken):
    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        return replace(reduction, leaving=[*reduction.leaving, *reduction.leaving])


class ForgetsItsRoundingError(Broken):
    """Right with fp32, where what was sent is what arrives."""

    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        chosen = select_exact(acc, k, state)
        reduction = gather_all(comm, chosen, k, state, chosen.threshold)
        return reduction if reduction.skipped else replace(reduction, leaving=[chosen.vector])


class SendsHalf(Broken):
    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        return TopkA.reduce(self, comm, acc, max(1, k // 2), state)


class NeedsSomething(Broken):
    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        if not sum(map(len, reduction.parts)):
            raise IndexError("nothing was selected")
        return reduction


class LooksAtTheLargestOnly(Broken):
    """A NaN that is not selected stays in the residual."""

    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        acc.select(math.inf, 0)
        values = acc.values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        indices = values.abs().topk(k).indices.sort().values.to(torch.int32)
        vector = oktopk.SparseVector(indices, values[indices.long()], acc.size)
        parts = comm.all_gather(vector, max_message_bytes(k, acc.size, comm.values), limit=k)
        return Reduction(parts=parts, leaving=[parts[comm.rank]], state=state, local_count=k)


class GivesUp(Broken):
    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        return skip(None) if comm.step == 2 else reduction


class Guesses(Broken):
    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        acc.select(math.inf, 0)
        indices = torch.randperm(acc.size)[:k].sort().values.to(torch.int32)
        vector = oktopk.SparseVector(indices, acc.at(indices), acc.size)
        return gather_all(comm, Chosen(vector, 0.0), k, state, state)


class CountsInItsState(Broken):
    """A state of its own kind, without a way to save it."""

    def state_problem(self, state: object, size: int) -> str | None:
        return None

    def mistake(self, comm: Any, reduction: Reduction) -> Reduction:
        return replace(reduction, state=Counter())

    def reduce(self, comm: Any, acc: Any, k: int, state: Any) -> Reduction:
        return super().reduce(comm, acc, k, None)


class Counter:
    pass


@pytest.mark.parametrize(
    ("algorithm", "case", "world", "said"),
    [
        (TellsRanksDifferentThings, "a prime", 2, "law 1"),
        (KeepsWhatItSent, "a prime", 3, "law 2"),
        (KeepsWhatItSent, "a prime", 1, "law 2"),
        (DropsWhatItDidNotSend, "k = 1", 2, "law 2"),
        (ForgetsItsRoundingError, "values e4m3", 2, "law 2"),
        (SendsHalf, "density 1", 3, "law 3"),
        (NeedsSomething, "zeros", 2, "IndexError('nothing was selected')"),
        (LooksAtTheLargestOnly, "one NaN", 2, "does not skip the step"),
        (LooksAtTheLargestOnly, "one infinity", 3, "does not skip the step"),
        (GivesUp, "a prime", 2, "law 5: a step was skipped"),
        (Guesses, "the same bits", 2, "the same inputs give other bits"),
        (CountsInItsState, "a checkpoint", 2, "raised "),
    ],
)
def test_a_broken_algorithm_fails_by_its_law(algorithm: type[TopkA], case: str, world: int, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_case(algorithm, case, world)
    assert f"{case}, P = {world}: " in str(caught.value)
    assert said in str(caught.value)
    with pytest.raises(AssertionError):
        check_algorithm(algorithm, worlds=[world])


def test_what_is_right_with_fp32_need_not_be_with_a_lossy_wire() -> None:
    check_case(ForgetsItsRoundingError, "a prime", 2)


class Half(ValueCodec):
    """fp16 of values over the largest: right, so that mistakes can be made to it."""

    name: ClassVar[str] = "half"
    number: ClassVar[int] = 140
    width: ClassVar[int] = 2

    def encode(self, values: Any) -> tuple[Any, float]:
        largest = np.abs(values).max(initial=np.float32(2.0**-100))
        return (values / largest).astype(np.float16).view(np.uint8), float(largest)

    def decode(self, stream: Any, scale: float) -> Any:
        return stream.view(np.float16).astype(np.float32) * np.float32(scale)


class Overflows(Half):
    def encode(self, values: Any) -> tuple[Any, float]:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint8), 1.0


class NeedsOne(Half):
    def encode(self, values: Any) -> tuple[Any, float]:
        largest = np.abs(values).max()
        return (values / largest).astype(np.float16).view(np.uint8), float(largest)


class SendsNothing(Half):
    def decode(self, stream: Any, scale: float) -> Any:
        return np.zeros(stream.size // 2, np.float32)


class TurnsSigns(Half):
    def decode(self, stream: Any, scale: float) -> Any:
        return -super().decode(stream, scale)


class IsMoody(Half):
    calls = 0

    def decode(self, stream: Any, scale: float) -> Any:
        IsMoody.calls += 1
        return super().decode(stream, scale) * np.float32(1 - 1e-3 * (IsMoody.calls % 2))


def test_good_codecs_pass() -> None:
    for codec in ("fp32", "e4m3", Half()):
        check_values(codec, worlds=[2])


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (Overflows, "decodes a value that is not finite"),
        (NeedsOne, "cannot encode 0 values"),
        (SendsNothing, "next to nothing of the values is sent"),
        (TurnsSigns, "the rounding error of .* is larger than the values"),
        (IsMoody, "decoded to other bits"),
    ],
)
def test_a_broken_codec_fails(codec: type[Half], said: str) -> None:
    with np.errstate(all="ignore"), pytest.raises(AssertionError, match=said):
        check_values(codec(), worlds=[2])
