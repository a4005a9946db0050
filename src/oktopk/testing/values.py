"""What a value codec must do: every length, finite values, the same bits, and an error that shrinks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..algorithms import ALGORITHMS
from ..kernels.values import Array
from ..wire.codecs import CodecError, ValueCodec, find_values, read_values, write_values
from .gradients import SIZE, all_in_one_region, heavy_tailed, tiny_and_huge
from .laws import assert_laws, run


def check_values(codec: str | ValueCodec, worlds: Iterable[int] = (2, 3)) -> None:
    """Check a value codec: lengths, finite values, determinism, an error that shrinks, and conservation.

    Args:
        codec: a name, or an object.
        worlds: numbers of ranks on which every algorithm uses it.

    Raises:
        AssertionError: a law does not hold.

    Example:
        >>> import oktopk.testing
        >>> oktopk.testing.check_values("fp16", worlds=[2])
    """
    found = find_values(codec)
    if isinstance(found, ValueCodec):
        try:
            _check_coding(found)
        except CodecError as error:
            raise AssertionError(str(error)) from error
    theirs = isinstance(found, ValueCodec)
    for world in worlds:
        for name in (name for name, one in ALGORITHMS.items() if one.takes_plugins or not theirs):
            for gradient in (heavy_tailed(SIZE), all_in_one_region, tiny_and_huge):
                assert_laws(run(world, gradient, 4, name, 0.05, values=codec))


def _awkward_values() -> Iterable[Array]:
    largest, random = float(np.finfo(np.float32).max), np.random.default_rng(0)
    ends = [largest], [-largest, largest], [1e-45], [1e-41] * 5, [largest, -1e-45]
    for values in ([], [0.0], [-0.0, 0.0], *ends):
        yield np.array(values, np.float32)
    for size in (1, 2, 7, 1000):
        for scale in (1e-30, 1.0, 1e30):
            yield (scale * random.standard_normal(size) * np.exp(random.standard_normal(size))).astype(np.float32)


def _check_coding(codec: ValueCodec) -> None:
    for values in _awkward_values():
        stream, decoded = np.empty(codec.width * values.size, np.uint8), np.empty_like(values)
        scale = write_values(codec, values, stream, decoded)
        again = read_values(codec, stream, scale, values.size)
        if not np.array_equal(again.view(np.uint32), decoded.view(np.uint32)):
            raise AssertionError(f"{codec!r}: the same bytes are decoded to other bits the second time")
        kept = np.linalg.norm(values.astype(np.float64) - decoded.astype(np.float64))
        if kept > np.linalg.norm(values.astype(np.float64)):
            raise AssertionError(f"{codec!r}: the rounding error of {values[:3]} … is larger than the values")
    usual = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    stream, decoded = np.empty(codec.width * 1000, np.uint8), np.empty_like(usual)
    write_values(codec, usual, stream, decoded)
    if np.linalg.norm(usual - decoded) > 0.99 * np.linalg.norm(usual):
        raise AssertionError(f"{codec!r}: next to nothing of the values is sent, and the residual grows for ever")
    first, second = str(codec), str(codec)
    if first != second:
        raise AssertionError(f"{codec!r}: the same bytes are decoded differently: ranks would not agree on it")
