"""Value codecs of plug-ins: ranks agree on one, messages survive the way, and what it decodes is not trusted."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oktopk
from oktopk import OkTopkError, WireError
from oktopk.engine.settings import Settings
from oktopk.kernels import codes, coding
from oktopk.testing.gradients import heavy_tailed
from oktopk.testing.laws import assert_laws, run
from oktopk.wire import message as wire
from oktopk.wire.codecs import CodecError, ValueCodec, describe_values
from oktopk.wire.sparse_vector import SparseVector

BACKENDS = (codes, coding)
VALUE_CODE, CHECKSUM = 22, 8


@dataclass(frozen=True)
class Rounded(ValueCodec):
    """Multiples of a step, in two bytes."""

    name: ClassVar[str] = "rounded"
    number: ClassVar[int] = 131
    width: ClassVar[int] = 2
    levels: int = 1000

    def encode(self, values: Any) -> tuple[Any, float]:
        largest = float(np.abs(values).max(initial=np.float32(0)))
        scale = np.float32(min(max(largest / self.levels, 2.0**-120), 2.0**110))
        whole = np.clip(np.rint(values / scale), -self.levels, self.levels)
        return whole.astype(np.int16).view(np.uint8), float(scale)

    def decode(self, stream: Any, scale: float) -> Any:
        return stream.view(np.int16).astype(np.float32) * np.float32(scale)


CODEC = Rounded()


def vector(count: int, size: int = 1000, seed: int = 0) -> SparseVector:
    random = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=random)[:count].sort().values.to(torch.int32)
    return SparseVector(indices, torch.randn(count, generator=random), size)


def tag(size: int = 1000) -> wire.Tag:
    return wire.Tag(step=7, bucket=3, phase=1, sender=2, size=size, start=0, span=size)


def patched(message: torch.Tensor, offset: int, value: int) -> torch.Tensor:
    """The message with another byte, and a checksum that is right again."""
    data = message.clone().numpy()
    data[offset] = value
    struct.pack_into("<Q", data.data, CHECKSUM, wire._checksum(data))
    return torch.from_numpy(data)


@given(st.integers(0, 300), st.integers(0, 2**16), st.floats(2.0**-100, 2.0**100))
def test_a_message_survives_the_way(count: int, seed: int, scale: float) -> None:
    """The receiver has the indices, and the values that the sender expects it to have, with any kernels."""
    part = vector(count, seed=seed)
    part = part.with_values(part.values * scale)
    messages = []
    for backend in BACKENDS:
        with mock.patch.object(wire, "codes", backend):
            message, seen = wire.encode(part, tag(), CODEC)
            found = wire.decode(message, tag(), codec=CODEC)
        assert torch.equal(found.vector.indices, part.indices)
        assert torch.equal(found.vector.values.view(torch.int32), seen.view(torch.int32))
        assert not found.nonfinite
        assert message.numel() <= wire.max_message_bytes(count, 1000, CODEC)
        assert (seen - part.values).abs().max().item() <= scale * 5e-3 if count else True
        messages.append(message)
    assert torch.equal(*messages)


def test_a_receiver_knows_only_the_codec_that_was_agreed_on() -> None:
    message, _ = wire.encode(vector(5), tag(), CODEC)
    assert message[VALUE_CODE] == CODEC.number
    with pytest.raises(WireError, match=r"unknown codes: .* values 131"):
        wire.decode(message, tag())

    class Other(Rounded):
        number: ClassVar[int] = 132

    with pytest.raises(WireError, match=r"unknown codes: .* values 131"):
        wire.decode(message, tag(), codec=Other())
    with pytest.raises(WireError, match=r"unknown codes: .* values 200"):
        wire.decode(patched(message, VALUE_CODE, 200), tag(), codec=CODEC)
    with pytest.raises(WireError, match="do not fit"):  # another width
        wire.decode(patched(message, VALUE_CODE, int(wire.ValueCode.FP32)), tag(), codec=CODEC)


LIES: dict[str, Callable[[Any], Any]] = {
    "too few": lambda values: values[:-1],
    "too many": lambda values: np.append(values, np.float32(0)),
    "none": lambda values: None,
    "of another type": lambda values: values.astype(np.float64),
    "in two dimensions": lambda values: values[:, None],
    "NaN": lambda values: values * np.float32(np.nan),
    "infinite": lambda values: values + np.float32(np.inf),
    "an error": lambda values: values[10**9],
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_codec_decodes_is_checked_before_anyone_sees_it(lie: str) -> None:
    """The sender's codec, but for what it makes of bytes: as with bytes that were made to deceive it."""
    message, _ = wire.encode(vector(5), tag(), CODEC)

    class Liar(Rounded):
        def decode(self, stream: Any, scale: float) -> Any:
            return LIES[lie](super().decode(stream, scale))

    with pytest.raises(WireError, match=r"message from rank 2 .*value codec 'rounded' (cannot decode|decodes)"):
        wire.decode(message, tag(), codec=Liar())
    with pytest.raises(CodecError, match="value codec 'rounded'"):  # and the sender does not send
        wire.encode(vector(5), tag(), Liar())


@pytest.mark.parametrize(
    ("encoded", "complaint"),
    [
        (lambda stream: (stream[:-1], 1.0), "encodes 5 values as uint8 of shape .9,., expected 10 uint8"),
        (lambda stream: (stream.view(np.uint16), 1.0), "encodes 5 values as uint16"),
        (lambda stream: (stream, float("nan")), "has the scale nan"),
        (lambda stream: (stream, 1e39), "has the scale inf"),
        (lambda stream: stream, "cannot encode 5 values"),
    ],
)
def test_what_a_codec_encodes_is_checked(encoded: Callable[[Any], Any], complaint: str) -> None:
    class Sloppy(Rounded):
        def encode(self, values: Any) -> tuple[Any, float]:
            return encoded(super().encode(values)[0])

    with np.errstate(over="ignore"), pytest.raises(CodecError, match=complaint):
        wire.encode(vector(5), tag(), Sloppy())


@given(st.binary(min_size=10, max_size=10), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_bytes_are_finite_values_or_a_wire_error(body: bytes, scale: float) -> None:
    message, _ = wire.encode(vector(5), tag(), CODEC)
    data = message.clone().numpy()
    data[-16:-6] = np.frombuffer(body, np.uint8)
    struct.pack_into("<f", data.data, 80, scale)
    struct.pack_into("<Q", data.data, CHECKSUM, wire._checksum(data))
    try:
        with np.errstate(over="ignore"):
            found = wire.decode(torch.from_numpy(data), tag(), codec=CODEC)
    except WireError:
        return
    assert found.vector.values.isfinite().all()


def test_what_is_not_finite_is_flagged_and_the_codec_does_not_see_it() -> None:
    seen = []

    class Watching(Rounded):
        def encode(self, values: Any) -> tuple[Any, float]:
            seen.append(values.copy())
            return super().encode(values)

    part = vector(4).with_values(torch.tensor([1.0, torch.nan, torch.inf, 2.0]))
    message, _ = wire.encode(part, tag(), Watching())
    assert seen[0].tolist() == [1.0, 0.0, 0.0, 2.0]
    found = wire.decode(message, tag(), codec=CODEC)
    assert found.nonfinite


@pytest.mark.parametrize("algorithm", [name for name, one in oktopk.ALGORITHMS.items() if one.takes_plugins])
def test_every_algorithm_conserves_with_it(algorithm: str) -> None:
    assert_laws(run(3, heavy_tailed(1009), 4, algorithm, 0.05, values=CODEC))


def test_its_error_stays_in_the_residual() -> None:
    """The coarser the codec, the more stays behind; with the fp32 wire nothing does at density 1."""
    left = [
        float(run(2, heavy_tailed(1009), 1, "topka", 1.0, values=values)[0][0].after.abs().sum())
        for values in ("fp32", Rounded(30_000), Rounded(100))
    ]
    assert left[0] == 0 < left[1] < left[2]


# Ranks have the same codec.


def disagreements(*codecs: Any) -> set[str]:
    def rank(comm: oktopk.Communicator) -> str:
        try:
            oktopk.sparse_allreduce(torch.ones(100), 0.1, comm=comm, values=codecs[comm.rank])
        except ValueError as error:
            return str(error).partition(":")[0]
        return "agreed"

    return set(oktopk.run_threads(len(codecs), rank))


class Newer(Rounded):
    """Another version: it has the same name and fields, and decodes differently."""

    __qualname__ = "Rounded"

    def decode(self, stream: Any, scale: float) -> Any:
        return -super().decode(stream, scale)


def test_ranks_with_another_codec_do_not_exchange() -> None:
    assert disagreements(CODEC, Rounded()) == {"agreed"}
    assert disagreements(CODEC, "fp16") == {"ranks disagree on values"}
    assert disagreements(CODEC, Rounded(levels=7)) == {"ranks disagree on values"}
    assert disagreements(CODEC, Newer()) == {"ranks disagree on values"}


def test_front_ends_compare_it_with_all_settings() -> None:
    def settings(codec: Any) -> Settings:
        return Settings(oktopk.ALGORITHMS["topka"](), 0.1, 0, values=codec)

    assert settings(CODEC).terms() == settings(Rounded()).terms()
    assert settings(CODEC).terms() != settings(Newer()).terms()
    assert settings("fp16").terms()["values"] == "fp16"

    def rank(comm: oktopk.Communicator) -> str:
        codec = Newer() if comm.rank else CODEC
        parameters = {"x": torch.ones(50, requires_grad=True)}
        try:
            with oktopk.AllReducer(parameters.items(), comm=comm, warmup_steps=0, values=codec) as reducer:
                reducer.sync({"x": torch.ones(50)})
        except (ValueError, OkTopkError) as error:
            return str(error)
        return "agreed"

    for said in oktopk.run_threads(2, rank):
        assert "ranks disagree on values" in said


def test_a_codec_by_name_is_the_one_that_was_registered() -> None:
    oktopk.VALUES["rounded"] = Rounded
    try:
        assert describe_values("rounded") == describe_values(CODEC)
        assert disagreements("rounded", CODEC) == {"agreed"}
    finally:
        del oktopk.VALUES["rounded"]
    with pytest.raises(ValueError, match="unknown value format 'rounded'"):
        describe_values("rounded")


@pytest.mark.parametrize(
    ("attribute", "value"), [("number", 3), ("number", 256), ("number", "200"), ("width", 0), ("width", 9)]
)
def test_a_number_or_width_that_is_not_a_plug_ins_is_refused(attribute: str, value: object) -> None:
    odd = type("Odd", (Rounded,), {attribute: value})
    with pytest.raises(ValueError, match=f"Odd.{attribute} must be an integer from "):
        oktopk.sparse_allreduce(torch.ones(10), 0.5, values=odd())
    assert replace(CODEC, levels=5) == Rounded(5)
